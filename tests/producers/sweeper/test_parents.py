"""Tasks in chunks whose submitter died, or whose chunks another release ended: PARENT goes on with them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient, SubmitFailed
from producers.connection.script import Call, run
from producers.contract import keys, model_fit
from producers.contract.fields import MAX_TEXTS
from producers.contract.stream import encode_rows
from producers.contract.task import Task
from producers.errors import InvalidTask, LimitReached, QueueFull, TaskFailed
from producers.sources.messages.replies import Reply, task_view
from producers.store import chunks, protocol
from producers.store.access.api_keys import Account, Limits
from producers.store.blobs import open_blobs
from producers.store.fleet.routing import Routing
from producers.store.usage.limits import Charge
from producers.store.waiting import Bounds, Room
from producers.sweeper.compact import Offload, compact
from producers.sweeper.tasks import advance_parents
from tests.producers.conftest import CARD, QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S

EMBEDDER = {**CARD, "capabilities": ["embed"], "pooling": {"dimensions": 2}}
#: Of three chunks.
TEXTS = [f"text {number}" for number in range(600)]


@pytest.fixture
def embedder(aclient: AsyncClient, valkey: Redis) -> str:
    valkey.hset(keys.MODELS, "tiny", json.dumps(EMBEDDER))
    return "tiny"


class Died(Exception):
    """The submitter was killed between two calls."""


def status(valkey: Redis, task_id: str) -> str:
    return (valkey.hget(keys.task(task_id), "status") or b"").decode()


async def test_one_draw_for_all_chunks_counts_once_in_the_ledger(
    aclient: AsyncClient, valkey: Redis, embedder: str
) -> None:
    state = Routing(embedder, 1, CARD["version"])
    valkey.hset(keys.routing(embedder), mapping={"generation": 1, "now": state.to_json()})
    await (await aclient.submit(kind="embed", model=embedder, input=TEXTS)).delete()
    rows: Any = valkey.xrange(keys.LEDGER)
    assert sorted(fields[b"drawn"] for _, fields in rows) == [b"", b"", b"1"]


async def test_what_its_submitter_did_not_write_to_the_end_is_ended(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.client.submission.PORTION", 1)  # a chunk in each script
    written = chunks.write
    calls: list[int] = []

    def dies(parent: str, first: int, *more: Any) -> Call:
        calls.append(first)
        if first == 2:
            raise Died
        return written(parent, first, *more)

    monkeypatch.setattr(chunks, "write", dies)
    with pytest.raises(Died):
        await aclient.submit(kind="embed", model=embedder, input=TEXTS, task_id="p")
    assert (calls, status(valkey, "p")) == ([0, 1, 2], "queued")
    assert await aclient.run(advance_parents()) == 0  # it may still be written
    valkey.hincrby(keys.task("p"), "written_at", -chunks.INTERRUPTED_MS)
    assert await aclient.run(advance_parents()) == 1
    assert (status(valkey, "p"), status(valkey, chunks.chunk_id("p", 0))) == ("failed", "cancelled")
    with pytest.raises(TaskFailed, match="gone before it had written all") as failed:
        await aclient.get("p").result()
    assert failed.value.code == "submit_failed"
    assert run(valkey, written("p", 2, {}, [{"task": "{}"}])) == [b"failed", 2]  # a late one writes nothing
    assert valkey.hgetall(keys.WAITING) == {}
    assert worker.take(QUEUE) is not None  # its claim finds a final record
    assert await aclient.run(advance_parents()) == 0


async def test_an_equal_call_writes_what_a_dead_one_left(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a source does with a message that comes again."""
    monkeypatch.setattr("producers.client.submission.PORTION", 1)
    write = chunks.write

    def dies(parent: str, first: int, *more: Any) -> Call:
        if first:
            raise Died
        return write(parent, first, *more)

    task: dict[str, Any] = {"kind": "embed", "model": embedder, "input": TEXTS, "idempotency_key": "k", "ttl": 60}
    with monkeypatch.context() as patched:
        patched.setattr(chunks, "write", dies)
        with pytest.raises(Died):
            await aclient.submit(**task)
    handle = await aclient.submit(**task)
    ids = [chunks.chunk_id(handle.id, number) for number in range(3)]
    assert {worker.take(QUEUE) for _ in range(3)} == set(ids)
    first, *others = (valkey.hgetall(keys.task(name)) for name in ids)
    own = {name.encode() for name in ("chunk", "created", "queued", "waits", *chunks.OWN_FIELDS)}
    assert all({**other, **{name: first[name] for name in own & first.keys()}} == first for other in others)
    for number, name in enumerate(ids):
        assert worker.claim(name).answer == "go"
        worker.finish(name, [0], result=encode_rows([[float(number)]] * (256, 256, 88)[number]))
    assert len((await handle.result()).rows or ()) == 600
    assert (await aclient.submit(**task)).id == handle.id
    assert worker.take(QUEUE) is None


async def test_the_key_of_what_was_not_written_to_the_end_makes_a_new_task(
    aclient: AsyncClient, valkey: Redis, embedder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> Call:
        raise Died

    task: dict[str, Any] = {"kind": "embed", "model": embedder, "input": TEXTS, "idempotency_key": "k"}
    with monkeypatch.context() as patched:
        patched.setattr(chunks, "write", dies)
        with pytest.raises(Died):
            await aclient.submit(**task)
    (interrupted,) = (name.decode() for name in valkey.zrange(keys.PARENTS, 0, -1))
    valkey.hincrby(keys.task(interrupted), "written_at", -chunks.INTERRUPTED_MS)
    assert await aclient.run(advance_parents()) == 1
    handle = await aclient.submit(**task)
    assert (status(valkey, interrupted), status(valkey, handle.id)) == ("failed", "queued")
    assert valkey.hget(keys.task(handle.id), "written") == b"3"
    assert (await aclient.submit(**task)).id == handle.id


async def test_what_a_release_before_has_ended_is_joined(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker
) -> None:
    """Its scripts know no parents."""
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS)
    ids = [chunks.chunk_id(handle.id, number) for number in range(3)]
    for name in ids:
        assert worker.claim(name).answer == "go"
    valkey.hdel(keys.task(ids[0]), "parent")  # as if it had none
    result = '{"rows":256,"width":1,"data":"%s"}' % ("AAAAAAAA" * 170 + "AAAAAA==")
    for name in (ids[2], ids[0]):
        worker.finish(name, [0], result=result)
    assert valkey.xlen(keys.stream(handle.id)) == 0
    assert await aclient.run(advance_parents()) == 0
    assert valkey.xlen(keys.stream(handle.id)) == 1
    worker.finish(ids[1], [0], result=result)
    assert (status(valkey, handle.id), valkey.xlen(keys.stream(handle.id))) == ("completed", 4)
    assert await aclient.run(advance_parents()) == 1


async def test_what_is_read_of_it_is_its_chunks_rows_and_a_reply_has_none(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker
) -> None:
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS, metadata={"a": "b"})
    for number, chunk in enumerate(model_fit.chunks(Task(kind="embed", model=embedder, input=TEXTS), EMBEDDER)):
        name = chunks.chunk_id(handle.id, number)
        worker.claim(name)
        worker.finish(name, [0], result=encode_rows([[float(at), 0.5] for at in chunk]))
    result = await handle.result()
    assert [row.tolist() for row in result.rows or ()] == [[float(at), 0.5] for at in range(600)]
    row: Any = SimpleNamespace(object=handle.id, type="response.completed")
    view = await task_view(aclient, row, Reply("s", "list:l", "c", "json"))
    assert (view["status"], view["metadata"], view["rows"]) == ("completed", {"a": "b"}, None)
    assert "too large" in view["omitted"]


@pytest.mark.parametrize("late", ["the task", "a chunk"])
async def test_its_deadline_ends_it_and_its_chunks(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker, late: str
) -> None:
    """Whichever of the two is found first, its error says the same."""
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS, timeout=60)
    ids = [chunks.chunk_id(handle.id, number) for number in range(3)]
    deadline = int(valkey.hget(keys.task(handle.id), "deadline") or 0)
    assert {int(valkey.hget(keys.task(name), "deadline") or 0) for name in ids} == {deadline}
    name = handle.id if late == "the task" else ids[1]
    valkey.hset(keys.task(name), "deadline", 1)
    assert run(valkey, protocol.expire(name)) == b"failed"
    with pytest.raises(TaskFailed, match=r"^The deadline passed") as failed:
        await handle.result()
    assert failed.value.code == "expired"
    assert await aclient.run(advance_parents()) == 1
    assert {status(valkey, name) for name in ids} <= {"cancelled", "failed"}
    assert valkey.zcard(keys.DEADLINES) == 0


async def test_chunks_are_kept_as_long_as_their_parent(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker, tmp_path: Path
) -> None:
    """Settled or not, in the store or in a blob; none is gone before it, and none stays for long."""
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS, ttl=3600)
    ids = [chunks.chunk_id(handle.id, number) for number in range(3)]
    for name in ids:
        worker.claim(name)
        worker.finish(name, [0], result=encode_rows([[1.0]] * 256))
        if name == ids[0]:  # before the others have ended
            worker.settle(name)
            assert valkey.ttl(keys.task(name)) > 7 * 24 * 3600
            assert (await compact(aclient, 0, Offload(open_blobs(str(tmp_path)), 0))).moved == 1
    assert run(valkey, protocol.orphan(handle.id)) == b"settled"
    for name in ids[1:]:
        worker.settle(name)
    kept = valkey.ttl(keys.task(handle.id))
    assert 3500 < kept <= 3600
    assert all(kept < valkey.ttl(keys.task(name)) <= kept + 120 for name in ids)
    assert all(kept < valkey.ttl(keys.stream(name)) <= kept + 180 for name in ids[1:])
    assert kept < valkey.ttl(keys.result(ids[0])) <= kept + 180
    ((_, noted),) = valkey.zrange(keys.FILE_NOTES, 0, -1, withscores=True)
    assert valkey.time()[0] + kept < noted + protocol.NOTED_S <= valkey.time()[0] + kept + 300


async def test_a_lost_chunk_ends_the_task(aclient: AsyncClient, valkey: Redis, embedder: str) -> None:
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS)
    valkey.delete(keys.task(chunks.chunk_id(handle.id, 0)))
    assert await aclient.run(advance_parents()) == 1
    with pytest.raises(TaskFailed) as failed:
        await handle.result()
    assert failed.value.code == "chunk_lost"


async def test_what_the_store_refuses_a_part_of_is_withdrawn(
    aclient: AsyncClient, valkey: Redis, embedder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey.set("text", "no hash")
    fails = Call(chunks.write("p", 0, {}, []).script, ("text",), ())
    monkeypatch.setattr(chunks, "write", lambda *_: fails)
    with pytest.raises(SubmitFailed, match="withdrawn"):
        await aclient.submit(kind="embed", model=embedder, input=TEXTS, task_id="p")
    assert status(valkey, "p") == "cancelled"


async def test_it_is_charged_and_bounded_as_all_of_its_chunks(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker
) -> None:
    def room(limit: int) -> Room:
        return Room(Bounds(in_all=limit), "key")

    def account() -> dict[str, int]:
        counts = valkey.hgetall(keys.account("k"))
        return {name: int(counts[name.encode()]) for name in ("requests", "open", "reserved", "spent")}

    task = Task(kind="embed", model=embedder, input=TEXTS, tier="priority")
    charge = Charge((Account("k", Limits(max_in_flight=1)),))
    with pytest.raises(QueueFull):
        await aclient.admit(task, None, charge=charge, room=room(2))
    assert not valkey.keys(keys.task("*"))
    handle = await aclient.admit(task, None, charge=charge, room=room(3))
    assert valkey.hget(keys.WAITING, "priority") == b"3"
    assert account() == {"requests": 1, "open": 1, "reserved": 600 * CARD["context_length"], "spent": 0}
    with pytest.raises(LimitReached):
        await aclient.admit(task, None, charge=charge)
    for number in range(3):
        worker.claim(chunks.chunk_id(handle.id, number))
        worker.finish(chunks.chunk_id(handle.id, number), [0], prompt_tokens=100)
    assert account() == {"requests": 1, "open": 0, "reserved": 0, "spent": 300}
    assert valkey.hgetall(keys.WAITING) == {}


def test_chunks_are_of_a_workers_size() -> None:
    def sizes(card: dict[str, Any], **fields: Any) -> list[int]:
        return [len(chunk) for chunk in model_fit.chunks(Task(model="m", **fields), {**CARD, **card})]

    embed = {"capabilities": ["embed"]}
    assert sizes(embed, kind="embed", input=["x"] * 256) == [256]
    assert sizes(embed, kind="embed", input=["x"] * 600) == [256, 256, 88]
    assert sizes(embed, kind="embed", input=["x" * 400_000] * 5) == [2, 2, 1]
    assert sizes({**embed, "pooling": {"dimensions": 4096}}, kind="embed", input=["x"] * 100) == [48, 48, 4]
    assert sizes(embed, kind="rerank", query="q" * 10_000, input=["x"] * 256) == [104, 104, 48]
    with pytest.raises(InvalidTask, match=f"at most {MAX_TEXTS}"):
        Task(model="m", kind="embed", input=["x"] * (MAX_TEXTS + 1))
    with pytest.raises(InvalidTask, match="at most 1048576 are taken"):
        Task(model="m", kind="embed", input=["x", "x" * (1 << 20) + "x"])
    wide = {**CARD, **embed, "pooling": {"dimensions": 4096}}
    with pytest.raises(InvalidTask, match="with 4096 numbers each, at most 3072"):
        model_fit.check(Task(model="m", kind="embed", input=["x"] * 3073), wide)


async def test_a_task_whose_stream_takes_no_more_chunks_fails(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker
) -> None:
    """The chunk has completed: its end is none of the reasons."""
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS, task_id="p")
    valkey.xadd(keys.stream("p"), {"e": "{}"}, id="1000000-0")
    chunk = chunks.chunk_id("p", 1)
    worker.claim(chunk)
    assert worker.finish(chunk, [0], result=encode_rows([[0.0]] * 256)) == ["won", "completed"]
    with pytest.raises(TaskFailed, match="takes no more texts"):
        await handle.result(PATIENCE_S)


async def test_a_task_of_an_earlier_ones_id_has_chunks_of_its_own(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker
) -> None:
    """An earlier task's chunks outlive it by minutes, ended and settled, or still waiting."""
    await aclient.submit(kind="embed", model=embedder, input=TEXTS, task_id="p", ttl=60)
    ids = [chunks.chunk_id("p", number) for number in range(3)]
    worker.claim(ids[0])
    worker.finish(ids[0], [0], result=encode_rows([[0.0]] * 256))
    worker.settle(ids[0])
    assert run(valkey, protocol.cancel("p")) == [1, b"cancelled"]
    assert run(valkey, protocol.orphan("p")) == b"settled"
    valkey.delete(keys.task("p"))  # its time to live is over
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS, task_id="p")
    assert valkey.hget(keys.WAITING, "default") == b"3"
    assert [valkey.ttl(keys.task(name)) for name in ids] == [-1] * 3
    for name in ids:
        assert worker.claim(name).answer == "go"
        worker.finish(name, [0], result=encode_rows([[1.0]] * 256))
    assert (status(valkey, "p"), valkey.hgetall(keys.WAITING)) == ("completed", {})
    assert [row.tolist() for row in (await handle.result()).rows or ()] == [[1.0]] * 768


async def test_what_a_deleted_task_used_is_in_the_ledger_by_its_chunks(
    aclient: AsyncClient, valkey: Redis, embedder: str, worker: FakeWorker
) -> None:
    handle = await aclient.submit(kind="embed", model=embedder, input=TEXTS)
    ids = [chunks.chunk_id(handle.id, number) for number in range(3)]
    worker.claim(ids[0])
    worker.finish(ids[0], [0], prompt_tokens=100)
    worker.settle(ids[0])
    worker.claim(ids[1])
    valkey.hset(keys.task(ids[1]), "prompt_tokens", 7)  # as its worker counted
    await handle.delete()
    rows = [row for _, row in valkey.xrange(keys.LEDGER)]
    counts = {(row[b"id"].decode(), row[b"status"].decode(), int(row[b"prompt"])) for row in rows}
    assert counts == {(ids[0], "completed", 100), (ids[1], "cancelled", 7), (ids[2], "cancelled", 0)}
    assert len(rows) == 3
    assert worker.finish(ids[1], [0]) == ["gone"]
    left = [keys.task(handle.id), *map(keys.task, ids), *map(keys.stream, ids), keys.UNSETTLED, keys.WAITING]
    assert not valkey.exists(*left)
    assert {name.decode() for name in valkey.zrange(keys.ERASING, 0, -1)} == {handle.id, ids[1]}, "for dead letters"
