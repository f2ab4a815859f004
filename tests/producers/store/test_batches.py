"""A batch's scripts: each line has one record, counts once, and is written once, however often a call is repeated."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import Call, arun, run, text
from producers.contract import keys
from producers.store import batches, protocol
from producers.store.batches import Batch, Block, Entry, Part, Written
from tests.producers.conftest import QUEUE
from tests.producers.fake_worker import FakeWorker

FIELDS = {"endpoint": "/v1/completions", "input_file": "file-1", "completion_window": "24h"}
SHARED = {"origin": "batch"}


def field(line: int, batch: str) -> dict[str, str | int]:
    task = {"task": "{}", "model": "tiny", "version": "0123456789ab", "queue": QUEUE, "tier": "batch", "n": 1}
    return {**task, "tokens": 9, "line": line, "deadline": 1 << 42}


class Store:
    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.id = batches.new_id(1_790_000_000_000)

    def twice(self, call: Call) -> Any:
        """The first answer; the second call must change nothing."""
        first = run(self.redis, call)
        before = {name: self.redis.dump(name) for name in self.redis.keys("penstock:batch*")}
        run(self.redis, call)
        assert {name: self.redis.dump(name) for name in self.redis.keys("penstock:batch*")} == before
        return first

    def read(self) -> Batch:
        return Batch.parse(self.id, self.redis.hgetall(keys.batch(self.id)))

    def block(self, first: int, last: int, bad: tuple[int, ...] = ()) -> Call:
        entries = [
            Entry((k + 1) * 100, error="{}")
            if k in bad
            else Entry((k + 1) * 100, batches.task_id(self.id, k), field(k, self.id) | {"batch": self.id})
            for k in range(first, last)
        ]
        return batches.expand(self.id, Block(first, entries), SHARED | {"batch": self.id})

    def begun(self, total: int) -> None:
        assert self.twice(batches.create(self.id, 3600, FIELDS)) == b"new"
        assert self.twice(batches.begin(self.id, total)) == b"in_progress"


@pytest.fixture
def store(valkey: Redis) -> Store:
    return Store(valkey)


def written(first: int, lines: int, **more: Any) -> Written:
    counts = {"outputs": lines, "errors": 0, "lapsed": 0, "parts": [Part("output", f"part-{first}", 7)]}
    return Written(first, lines, lines * 100, **{**counts, **more})


def test_a_line_has_one_record_and_counts_once(store: Store, valkey: Redis) -> None:
    store.begun(4)
    assert store.twice(store.block(0, 3, bad=(1,)))[1:] == [3]
    ids = [batches.task_id(store.id, k) for k in (0, 2)]
    assert {text(name) for name in valkey.zrange(keys.SUBMITTING, 0, -1)} == set(ids)
    assert valkey.zcard(keys.DEADLINES) == 2
    assert valkey.hkeys(keys.batch_refused(store.id)) == [b"1"]
    assert (store.read().count("line"), store.read().count("offset"), store.read().count("failed")) == (3, 300, 1)
    assert valkey.hgetall(keys.WAITING) == {b"line": b"2", b"line " + QUEUE.encode(): b"2"}
    assert not valkey.exists(keys.WAITING_TENANTS), "a batch is bounded by its window, not as its tenant's tasks are"
    for name in ids:  # whatever makes it final counts it
        run(valkey, protocol.queued(name))
        run(valkey, protocol.cancel(name))
        run(valkey, protocol.cancel(name))
    assert store.read().count("failed") == 3
    assert not valkey.exists(keys.WAITING, keys.WAITING_TOKENS)


def test_no_line_is_made_while_the_store_has_no_room(store: Store, valkey: Redis) -> None:
    store.begun(3)
    valkey.setrange("ballast", 20_000_000, "x")
    valkey.config_set("maxmemory", int(valkey.info("memory")["used_memory"] / 0.62))
    try:
        assert run(valkey, store.block(0, 3))[1:] == [0]
        assert (store.read().count("line"), store.read().count("failed")) == (0, 0)
        valkey.delete("ballast", keys.WAITING_MEMORY)
        assert run(valkey, store.block(0, 3))[1:] == [3]
    finally:
        valkey.config_set("maxmemory", "0")
        valkey.delete("ballast", keys.WAITING_MEMORY)


def test_lines_are_charged_once_up_to_what_accounts_allow(store: Store, valkey: Redis) -> None:
    asked = {"tokens": 9, "prompt": 4, "output": 5, "least": 5, "width": 1}

    def block(first: int, last: int, **limits: int) -> Call:
        charge = json.dumps({**asked, "limits": [limits]})
        of_line = [(batches.task_id(store.id, k), field(k, store.id) | {"batch": store.id}) for k in range(first, last)]
        entries = [Entry((k + 1) * 100, *one, charge) for k, one in enumerate(of_line, first)]
        return batches.expand(store.id, Block(first, entries, ["a"], "{}"), SHARED)

    store.begun(6)
    assert store.twice(block(0, 6, max_in_flight=2))[1:] == [2]
    assert (store.read().count("line"), store.read().count("offset")) == (2, 200)
    assert store.twice(block(2, 6, max_in_flight=2))[1:] == [0]
    assert store.twice(block(2, 6, budget_tokens=27, max_in_flight=5))[1:] == [1], "the rest is reserved"
    assert valkey.hmget(keys.account("a"), "open", "reserved", "requests") == [b"3", b"27", b"3"]
    assert store.twice(block(3, 6, budget_tokens=8))[1:] == [3, 3, 4, 5]
    assert (store.read().count("line"), store.read().count("failed")) == (6, 3)
    for k in range(3):
        run(valkey, protocol.queued(batches.task_id(store.id, k)))
        run(valkey, protocol.cancel(batches.task_id(store.id, k)))
    assert valkey.hmget(keys.account("a"), "open", "reserved", "spent") == [b"0", b"0", b"0"]


def test_a_completed_line_counts_as_completed(store: Store, valkey: Redis, model: str, worker: FakeWorker) -> None:
    store.begun(1)
    run(valkey, store.block(0, 1))
    name = batches.task_id(store.id, 0)
    worker.serve(name, ["x"])
    assert (store.read().count("completed"), store.read().count("failed")) == (1, 0)
    assert run(valkey, batches.finalize(store.id)) == b"finalizing"


def test_written_lines_are_forgotten(store: Store, valkey: Redis, model: str, worker: FakeWorker) -> None:
    store.begun(2)
    run(valkey, store.block(0, 2, bad=(1,)))
    worker.serve(batches.task_id(store.id, 0), ["x"])
    assert run(valkey, batches.begin_parts(store.id, ["part-0"])) == 1
    assert store.twice(batches.written(store.id, written(0, 2, outputs=1, errors=1))) == 1
    assert run(valkey, batches.written(store.id, written(0, 1))) == 0, "another wrote it"
    assert not valkey.keys("penstock:task:*")
    assert not valkey.keys("penstock:stream:*")
    assert not valkey.exists(keys.batch_refused(store.id), keys.SETTLED, keys.UNSETTLED)
    assert valkey.hgetall(keys.batch_parts(store.id)) == {b"0": f"[{Part('output', 'part-0', 7).to_json()}]".encode()}


def test_a_final_line_that_is_not_settled_is_left_to_its_worker(store: Store, valkey: Redis) -> None:
    store.begun(1)
    run(valkey, store.block(0, 1))
    name = batches.task_id(store.id, 0)
    run(valkey, protocol.queued(name))
    run(valkey, protocol.cancel(name))
    assert run(valkey, batches.written(store.id, written(0, 1))) == 1
    assert run(valkey, protocol.orphan(name)) == b"settled"
    assert 0 < valkey.ttl(keys.task(name)) <= 60


@pytest.mark.parametrize(
    ("lapsed", "cancelled", "expected"), [(0, 0, "completed"), (1, 0, "expired"), (1, 1, "cancelled")]
)
def test_how_a_batch_ends(store: Store, valkey: Redis, lapsed: int, cancelled: int, expected: str) -> None:
    store.begun(1)
    run(valkey, store.block(0, 1, bad=(0,)))
    assert run(valkey, batches.end(store.id, None, None)) == b"in_progress", "it is not written"
    if cancelled:
        assert store.twice(batches.cancel(store.id)) == [1, b"cancelling"]
    assert store.twice(batches.finalize(store.id)) == (b"cancelling" if cancelled else b"finalizing")
    run(valkey, batches.written(store.id, written(0, 1, outputs=0, errors=1, lapsed=lapsed)))
    assert store.twice(batches.end(store.id, None, "file-e")) == expected.encode()
    read = store.read()
    assert (read.status, read.count("failed"), read.fields["error_file"]) == (expected, 1, "file-e")
    assert "output_file" not in read.fields
    assert read.time(f"{expected}_at")
    assert run(valkey, batches.cancel(store.id)) == [0, expected.encode()]
    assert store.twice(batches.close(store.id)) == 1
    assert not valkey.zcard(keys.BATCHES)
    assert valkey.ttl(keys.batch(store.id)) > 0


def test_nothing_is_expanded_after_the_deadline_or_a_cancel(store: Store, valkey: Redis) -> None:
    store.begun(2)
    valkey.hset(keys.batch(store.id), "deadline", 1)
    assert run(valkey, store.block(0, 1)) == []
    assert run(valkey, batches.finalize(store.id)) == b"finalizing"
    assert run(valkey, store.block(0, 1)) == []
    assert not valkey.keys("penstock:task:*")


def test_a_batch_may_fail_or_be_cancelled_before_it_begins(store: Store, valkey: Redis) -> None:
    run(valkey, batches.create(store.id, 3600, FIELDS))
    reasons = [{"code": "invalid_json", "line": 3, "message": "no JSON", "param": None}]
    assert store.twice(batches.fail(store.id, reasons)) == b"failed"
    assert run(valkey, batches.begin(store.id, 1)) == b"failed"
    assert store.read().json("reasons") == reasons
    other = Store(valkey)
    run(valkey, batches.create(other.id, 3600, FIELDS))
    run(valkey, batches.cancel(other.id))
    assert other.twice(batches.end(other.id, None, None)) == b"cancelled"


def test_the_list_of_batches(valkey: Redis, valkey_url: str) -> None:
    made = []
    for k in range(7):
        made.append(batches.new_id(1_790_000_000_000 + k))
        run(valkey, batches.create(made[-1], 60, FIELDS | ({"tenant": "a"} if k % 2 else {})))
    made.reverse()

    async def listed() -> None:
        async with AsyncClient(valkey_url) as client:
            assert [b.id for b in await batches.page(client.store, 3)] == made[:3]
            assert [b.id for b in await batches.page(client.store, 9, after=made[2])] == made[3:]
            assert [b.id for b in await batches.page(client.store, 9, tenant="a")] == made[1::2]
            assert await batches.open_batches(client.store) == made[::-1]
            assert await batches.trim(client.store, 1_800_000_000_000) == 7
            late = batches.new_id(1_800_000_000_000)
            await arun(client.store, batches.create(late, 60, FIELDS | {"tenant": "a"}))
            assert [b.id for b in await batches.page(client.store, 9, tenant="a")] == [late], "older ones have left"
            assert 0 < await client.store.ttl(keys.batch_index("a")) <= batches.LISTED_S

    asyncio.run(listed())


class TestOfATenant:
    """What all batches of a tenant may have together."""

    def made(self, valkey: Redis, n: int, tenant: str = "a", most: int | None = 2) -> tuple[str, str]:
        name = batches.new_id(1_790_000_000_000 + n)
        return name, text(run(valkey, batches.create(name, 3600, FIELDS | {"tenant": tenant}, most)))

    def test_so_many_may_be_open(self, valkey: Redis) -> None:
        made = [self.made(valkey, n) for n in range(3)]
        assert [said for _, said in made] == ["new", "new", "full"]
        assert not valkey.exists(keys.batch(made[2][0]))
        assert self.made(valkey, 0, "b")[1] == self.made(valkey, 3, most=None)[1] == "new"
        assert run(valkey, batches.create(made[0][0], 3600, FIELDS | {"tenant": "a"}, 2)) == b"exists"

    def test_one_that_has_ended_does_not_count_before_it_is_tidied_up(self, valkey: Redis) -> None:
        (first, _), (second, _) = [self.made(valkey, n) for n in range(2)]
        run(valkey, batches.fail(first, []))
        assert self.made(valkey, 2)[1] == "new"
        run(valkey, batches.fail(second, []))
        for name in (first, second):
            run(valkey, batches.close(name))
        assert valkey.scard(keys.open_batches("a")) == 1
        assert [self.made(valkey, n)[1] for n in (3, 4)] == ["new", "full"]

    def test_one_that_is_gone_gives_its_place_back(self, valkey: Redis) -> None:
        made = [self.made(valkey, n)[0] for n in range(2)]
        valkey.delete(keys.batch(made[0]))
        assert [self.made(valkey, n)[1] for n in (2, 3)] == ["new", "full"]

    def test_the_oldest_that_has_ended_makes_room_for_a_new_one(
        self, valkey: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches, "MOST_KEPT", 3)
        made = [self.made(valkey, n, most=None)[0] for n in range(3)]
        for name in made[1:]:
            run(valkey, batches.fail(name, []))
            run(valkey, batches.close(name))
        made.append(self.made(valkey, 3, most=None)[0])
        kept = [made[0], *made[2:]]
        assert [text(name) for name in valkey.zrange(keys.batch_index("a"), 0, -1)] == kept
        assert [bool(valkey.exists(keys.batch(name))) for name in made] == [True, False, True, True]
        assert [text(name) for name in valkey.zrange(keys.BATCH_INDEX, 0, -1)] == kept

    def block(self, name: str, first: int, last: int, most: int) -> list[int]:
        of_line = [(batches.task_id(name, k), field(k, name) | {"batch": name}) for k in range(first, last)]
        entries = [Entry((k + 1) * 100, *one) for k, one in enumerate(of_line, first)]
        done: list[int] = run(self.valkey, batches.expand(name, Block(first, entries), SHARED, most))
        return done[1:]

    @pytest.fixture(autouse=True)
    def _store(self, valkey: Redis) -> None:
        self.valkey = valkey

    def test_their_lines_in_the_store_are_bounded_together(self, valkey: Redis) -> None:
        first, second = (self.made(valkey, n)[0] for n in range(2))
        other = self.made(valkey, 2, "b")[0]
        for name in (first, second, other):
            run(valkey, batches.begin(name, 9))
        assert self.block(first, 0, 4, 6) == [4]
        assert self.block(second, 0, 4, 6) == [2]
        assert self.block(second, 2, 4, 6) == [0]
        assert self.block(other, 0, 4, 6) == [4]
        for k in range(3):
            run(valkey, protocol.cancel(batches.task_id(first, k)))
        assert self.block(second, 2, 4, 6) == [0], "they have ended, and are not written"
        run(valkey, batches.written(first, written(0, 3)))
        assert self.block(second, 2, 9, 6) == [3]

    def test_their_bytes_in_the_inputs_are_bounded_together(
        self, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches, "MAX_BYTES", 450)
        first, second = (self.made(valkey, n)[0] for n in range(2))
        for name in (first, second):
            run(valkey, batches.begin(name, 9))
        assert self.block(first, 0, 3, 99) == [3]
        assert self.block(second, 0, 3, 99) == [1]

        async def read() -> tuple[int, int, int]:
            async with AsyncClient(valkey_url) as client:
                return await batches.lines_of(client.store, "a")

        assert asyncio.run(read()) == (4, 400, 0)

    def test_their_results_in_the_store_are_bounded_together(
        self, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches, "MAX_RESULT_BYTES", 500)
        first, second = (self.made(valkey, n)[0] for n in range(2))
        for name in (first, second):
            run(valkey, batches.begin(name, 9))

        def block(name: str, start: int, last: int, size: int) -> list[int]:
            lines = {k: field(k, name) | {"batch": name, "result_bytes": size} for k in range(start, last)}
            entries = [Entry((k + 1) * 100, batches.task_id(name, k), fields) for k, fields in lines.items()]
            done: list[int] = run(self.valkey, batches.expand(name, Block(start, entries), SHARED, 99))
            return done[1:]

        async def results() -> int:
            async with AsyncClient(valkey_url) as client:
                return (await batches.lines_of(client.store, "a"))[2]

        assert block(first, 0, 1, 800) == [1], "alone, it is made, or its batch would never go on"
        assert block(second, 0, 1, 1) == [0]
        run(valkey, protocol.cancel(batches.task_id(first, 0)))
        run(valkey, batches.written(first, written(0, 1)))
        assert asyncio.run(results()) == 0
        assert block(second, 0, 4, 200) == [2]
        assert block(first, 1, 2, 101) == [0]
        assert block(first, 1, 2, 100) == [1]
        assert asyncio.run(results()) == 500
        valkey.delete(keys.task(batches.task_id(second, 0)))  # lost: it counts until all of its batch is written
        run(valkey, batches.written(second, written(0, 1)))
        assert block(first, 2, 3, 100) == [0]
        run(valkey, batches.written(second, written(1, 1)))
        assert asyncio.run(results()) == 100
