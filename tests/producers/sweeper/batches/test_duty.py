"""How batches end: cancelled, late, refused as a whole, or with lines that failed."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from engine.grammar.trial import Trials, stopped
from producers import AsyncClient
from producers.admin import routes
from producers.connection.script import run
from producers.contract import keys
from producers.contract.record import error_json
from producers.gateway import batch_endpoints as line_endpoints
from producers.gateway.batch_endpoints import LineEndpoints
from producers.store import batches, files, protocol
from producers.store.access.api_keys import Key, Limits
from producers.store.fleet import cards
from producers.store.fleet.adapters import StoredAdapter
from producers.store.fleet.routing import Routing
from producers.store.usage.prices import Prices
from producers.sweeper.batches import expand
from producers.sweeper.batches.duty import Batches, Turns
from producers.sweeper.compact import Offload, compact
from producers.sweeper.retention import remove_files
from producers.sweeper.tasks import expire_late
from tests.aws import Aws
from tests.chaos.batching import BAD, GOOD, Job, Serving, make, names_in
from tests.producers.conftest import CARD
from tests.producers.contract.test_record import GOOD as TRACEPARENT
from tests.producers.fake_worker import FakeWorker
from tests.producers.store.test_s3 import bucket_of
from tests.waiting import PATIENCE_S, auntil

pytestmark = pytest.mark.usefixtures("model")


@asynccontextmanager
async def sweeping(url: str, job: Job, **sizes: int) -> AsyncIterator[AsyncClient]:
    """The leader's part in batches, and in deadlines, with small blocks."""
    async with AsyncClient(url) as client:
        endpoints = LineEndpoints(client)

        async def counted(done: dict[str, int]) -> None:
            pass

        async def late() -> None:
            while True:
                await client.run(expire_late())
                await asyncio.sleep(0.05)

        duty = Batches(client, job.blobs, endpoints, counted, **({"block": 4, "part": 4} | sizes))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(duty.run(0.02)), group.create_task(late())]
            yield client
            for task in tasks:
                task.cancel()
        endpoints.close()


def codes(job: Job) -> dict[str, str]:
    """Each line of the error file: its own error's code, or the status of its answer."""
    return {
        name: line["error"]["code"] if line["error"] else str(line["response"]["status_code"])
        for name, line in job.lines("error").items()
    }


async def test_what_ran_is_in_the_output_of_a_cancelled_batch(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    """What was never begun, waited, or was never expanded is among the errors."""
    job = Job(valkey, tmp_path, [GOOD, BAD] + [GOOD] * 8, traceparent=TRACEPARENT)
    async with sweeping(valkey_url, job, window=6):
        await auntil(lambda: valkey.zcard(keys.SUBMITTING) == 0 and job.read().count("line") == 6)
        assert valkey.hget(keys.task(batches.task_id(job.id, 0)), "traceparent") == TRACEPARENT.encode()
        worker.serve(batches.task_id(job.id, 0))
        running = batches.task_id(job.id, 2)
        worker.claim(running)
        assert run(valkey, batches.cancel(job.id)) == [1, b"cancelling"]
        await auntil(lambda: valkey.hexists(keys.task(running), "cancel"))
        assert job.read().status == "cancelling", "a line still runs"
        worker.finish(running, [0])
        await auntil(job.ended)
    assert job.read().status == "cancelled"
    assert list(job.lines("output")) == ["r0"]
    assert codes(job) == {"r1": "400"} | {f"r{k}": "batch_cancelled" for k in range(2, 10)}
    assert job.faults() == []


async def test_a_line_names_an_adapter_by_either_of_its_names(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    adapter = StoredAdapter("mine", "tiny", "0123456789ab", 8, 1, 1)
    valkey.hset(keys.ADAPTERS, "mine", json.dumps(asdict(adapter)))
    state = Routing("tiny", 1, CARD["version"])
    valkey.hset(keys.routing("tiny"), mapping={"generation": 1, "now": state.to_json()})
    job = Job(valkey, tmp_path, [GOOD | {"model": name} for name in ("mine", "tiny:mine")])
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.ended() or (job.read().count("line") == 2 and not valkey.zcard(keys.SUBMITTING)))
        for line in range(2):
            task = batches.task_id(job.id, line)
            fields = valkey.hmget(keys.task(task), "adapter", "alias", "generation")
            assert fields == [b"0123456789ab", b"default", b"1"]
            worker.serve(task)
        await auntil(job.ended)
    assert {line["response"]["body"]["model"] for line in job.lines("output").values()} == {"mine"}
    assert job.faults() == []


async def test_all_lines_of_a_batch_go_to_one_version(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Vectors of two versions cannot be compared."""
    cards.add_version(valkey, CARD | {"version": "f" * 12}, {})
    routes.set_split(valkey, "tiny", {"f" * 12: 50})
    job = Job(valkey, tmp_path, [*[GOOD] * 12, GOOD | {"model": f"tiny@{'f' * 12}"}])
    async with sweeping(valkey_url, job, block=1):
        await auntil(lambda: job.read().count("line") == 13)
    assert len({valkey.hget(keys.task(batches.task_id(job.id, line)), "version") for line in range(12)}) == 1
    named = [valkey.hget(keys.task(batches.task_id(job.id, line)), "named") for line in (0, 12)]
    assert named == [None, b"f" * 12], "a replay of its dead letter names it, too"


async def test_batches_pause_while_the_store_has_no_room_and_no_line_is_refused(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    valkey.setrange("ballast", 20_000_000, "x")
    job = Job(valkey, tmp_path, [GOOD] * 10)
    valkey.config_set("maxmemory", int(valkey.info("memory")["used_memory"] / 0.62))
    try:
        async with sweeping(valkey_url, job):
            await auntil(lambda: "batches pause until the store has room" in caplog.text)
            assert job.read().status == "in_progress"
            assert job.read().count("line") == 0
            valkey.delete("ballast")
            for line in range(10):
                await auntil(lambda: valkey.hexists(keys.task(batches.task_id(job.id, line)), "queued"))  # noqa: B023
                worker.serve(batches.task_id(job.id, line))
            await auntil(job.ended)
    finally:
        valkey.config_set("maxmemory", "0")
        valkey.delete("ballast", keys.WAITING_MEMORY)
    assert job.read().status == "completed"
    assert len(job.lines("output")) == 10
    assert job.faults() == []


async def test_what_is_not_done_at_the_deadline_is_expired(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    job = Job(valkey, tmp_path, [GOOD, BAD] + [GOOD] * 8)
    async with sweeping(valkey_url, job, window=6):
        await auntil(lambda: valkey.zcard(keys.SUBMITTING) == 0 and job.read().count("line") == 6)
        worker.serve(batches.task_id(job.id, 0))
        begun = batches.task_id(job.id, 2)
        worker.claim(begun)
        worker.append(begun, 0, ["Hello"])
        run(valkey, protocol.release(begun, worker.claims[begun]))
        valkey.hset(keys.batch(job.id), "deadline", 1)
        for line in range(2, 6):
            valkey.hset(keys.task(batches.task_id(job.id, line)), "deadline", 1)
            valkey.zadd(keys.DEADLINES, {batches.task_id(job.id, line): 1})
        await auntil(job.ended)
    assert job.read().status == "expired"
    assert list(job.lines("output")) == ["r0"]
    assert codes(job) == {"r1": "400"} | {f"r{k}": "batch_expired" for k in range(2, 10)}
    assert job.faults() == []


async def test_a_batch_whose_lines_cannot_be_made_ends_at_its_deadline(
    valkey: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong here, its caller gets files and an end."""

    async def fails(*_: Any) -> None:
        raise RuntimeError("a fault of this program")

    monkeypatch.setattr(LineEndpoints, "tasks", fails)
    job = Job(valkey, tmp_path, [GOOD] * 3)
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.read().status == "in_progress")
        valkey.hset(keys.batch(job.id), "deadline", 1)
        await auntil(job.ended)
    assert job.read().status == "expired"
    assert codes(job) == dict.fromkeys(("r0", "r1", "r2"), "batch_expired")


async def test_a_line_that_fails_has_the_answer_that_a_caller_would_have(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    job = Job(valkey, tmp_path, [GOOD] * 3)
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.read().count("line") == 3 and not valkey.zcard(keys.SUBMITTING))
        first, second, third = (batches.task_id(job.id, line) for line in range(3))
        worker.claim(first)
        worker.finish(first, [0], status="failed", error={"code": "context_length_exceeded", "message": "Too long."})
        worker.settle(first)
        worker.serve(second)
        valkey.delete(keys.task(third))  # by hand
        await auntil(job.ended)
    assert codes(job) == {"r0": "400", "r2": "line_lost"}
    assert job.lines("error")["r0"]["response"]["body"]["error"]["message"] == "Too long."
    answer = job.lines("output")["r1"]["response"]
    assert answer["request_id"] == second
    assert answer["body"]["choices"][0]["text"] == "Hello, world"
    assert job.read().status == "completed"
    assert job.faults() == []


async def test_lines_whose_records_or_streams_are_broken_hold_up_no_other(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    job = Job(valkey, tmp_path, [GOOD] * 5)
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.read().count("line") == 5 and not valkey.zcard(keys.SUBMITTING))
        garbage, foreign, usage, task, good = (batches.task_id(job.id, line) for line in range(5))
        for name, entry in ((garbage, "{"), (foreign, "[0,7,5]")):
            worker.claim(name)
            valkey.xadd(keys.stream(name), {"e": entry}, id="1000000-0")
            error = error_json("dead_lettered", "The message cannot be used.")
            run(valkey, protocol.release(name, worker.claims[name], error=error, letter="broken"))
        worker.serve(usage)
        valkey.hset(keys.task(usage), "usage", "none")  # before the part's last line has ended
        worker.claim(task)
        valkey.hset(keys.task(task), "task", "none")
        worker.finish(task, [0], status="failed", error={"code": "engine_error", "message": "No."})
        worker.serve(good)
        await auntil(job.ended)
    assert codes(job) == {"r0": "500", "r1": "500", "r2": "line_lost", "r3": "500"}
    bodies = [job.lines("error")[name]["response"]["body"]["error"] for name in ("r0", "r1")]
    assert [body["code"] for body in bodies] == ["dead_lettered"] * 2
    assert job.lines("output").keys() == {"r4"}
    assert job.read().status == "completed"


async def test_lines_with_log_probabilities_and_blocks_are_answered(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    """A model without a tokenizer has nothing to spell them with: that is the line's error, and not the batch's."""
    job = Job(valkey, tmp_path, [GOOD | {"logprobs": 1}, GOOD])
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.read().count("line") == 2 and not valkey.zcard(keys.SUBMITTING))
        worker.serve(batches.task_id(job.id, 0))
        worker.serve(batches.task_id(job.id, 1), ["\u2028"] * 3)
        await auntil(job.ended)
    assert codes(job) == {"r0": "400"}
    (name,) = (value for field, value in job.read().fields.items() if field == "output_file")
    whole = (tmp_path / name).read_bytes()
    assert whole.isascii(), "some readers end a line at U+2028"
    assert len(whole.decode().splitlines()) == 1


async def test_a_batch_runs_in_a_bucket_and_its_lines_may_wait_there(
    valkey: Redis, valkey_url: str, worker: FakeWorker, aws: Aws
) -> None:
    """Results that wait for the others of their part are moved to files meanwhile."""
    job = Job(valkey, bucket_of(aws), [GOOD, BAD, GOOD, GOOD])
    async with sweeping(valkey_url, job) as client:
        await auntil(lambda: job.read().count("line") == 4 and not valkey.zcard(keys.SUBMITTING))
        first, last = (batches.task_id(job.id, line) for line in (0, 3))
        worker.serve(first, ["a", "b"])
        worker.serve(batches.task_id(job.id, 2), ["c"])
        assert (await compact(client, 0, Offload(job.blobs, 1))).moved == 2
        assert {name for name in names_in(job.blobs.location) if name.startswith("result-")}
        worker.serve(last, ["d"])
        await auntil(job.ended)
        await remove_files(client.store, job.blobs)
    texts = {name: line["response"]["body"]["choices"][0]["text"] for name, line in job.lines("output").items()}
    assert texts == {"r0": "ab", "r2": "c", "r3": "d"}
    assert codes(job) == {"r1": "400"}
    assert job.faults() == []


async def test_a_response_in_a_line_is_answered(
    valkey: Redis, valkey_url: str, tmp_path: Path, worker: FakeWorker
) -> None:
    """One that this version cannot answer is its line's error: the batch ends."""
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD | {"capabilities": ["generate", "chat"]}))
    body = {"model": "tiny", "input": "Hi", "max_output_tokens": 4, "metadata": {"a": "b"}}
    job = Job(valkey, tmp_path, [body] * 2, url="/v1/responses")
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.read().count("line") == 2 and not valkey.zcard(keys.SUBMITTING))
        valkey.hset(keys.task(batches.task_id(job.id, 1)), "response", "{}")
        for line in range(2):
            worker.serve(batches.task_id(job.id, line))
        await auntil(job.ended)
    said = job.lines("output")["r0"]["response"]["body"]
    assert (said["object"], said["status"], said["metadata"]) == ("response", "completed", {"a": "b"})
    assert said["output"][0]["content"][0]["text"] == "Hello, world"
    assert codes(job) == {"r1": "500"}
    assert job.faults() == []


@pytest.mark.parametrize(
    ("content", "reasons"),
    [
        (b"{]\n", [("invalid_json_line", 1)]),
        (
            b'\n{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "huge"}}',
            [("model_not_found", 2)],
        ),
        (b"\n", [("empty_file", None)]),
    ],
)
async def test_a_bad_input_fails_the_whole_batch(
    valkey: Redis, valkey_url: str, tmp_path: Path, content: bytes, reasons: Sequence[tuple[str, int | None]]
) -> None:
    job = Job(valkey, tmp_path, [])
    run(valkey, batches.fail(job.id, []))
    job.id, job.input = make(valkey, job.blobs, "/v1/completions", [content])
    async with sweeping(valkey_url, job):
        await auntil(job.ended)
    batch = job.read()
    assert batch.status == "failed"
    assert [(reason["code"], reason["line"]) for reason in batch.json("reasons")] == reasons
    assert not valkey.keys(keys.task("*"))


async def test_an_input_that_is_gone_fails_the_batch(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Its lines are cancelled, and nothing of them is left."""
    job = Job(valkey, tmp_path, [GOOD] * 10)
    async with sweeping(valkey_url, job, window=6) as client:
        await auntil(lambda: job.read().count("line") == 6)
        await files.remove(client.store, job.blobs, job.input)
        for line in range(4):
            name = batches.task_id(job.id, line)
            await auntil(lambda name=name: valkey.hget(keys.task(name), "status") == b"queued")
            FakeWorker(valkey).serve(name)
        await auntil(job.ended)
    assert job.read().status == "failed"
    assert job.read().json("reasons")[0]["code"] == "input_file_gone"
    assert not [name for name in os.listdir(tmp_path) if name.startswith("part-")]
    assert {valkey.hget(name, "ttl") for name in valkey.keys(keys.task("*"))} <= {b"60"}


async def test_an_input_whose_content_is_in_another_place_of_files_says_so(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    job = Job(valkey, tmp_path, [GOOD])
    job.blobs.delete(job.input)
    async with sweeping(valkey_url, job):
        await auntil(job.ended)
    (reason,) = job.read().json("reasons")
    assert (reason["code"], "not in the sweeper's place of files" in reason["message"]) == ("input_file_gone", True)


async def test_the_store_holds_a_window_of_the_lines(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    job = Job(valkey, tmp_path, [GOOD] * 50)
    most = 0
    with Serving(valkey):
        async with sweeping(valkey_url, job, window=8):

            def look() -> bool:
                nonlocal most
                most = max(most, len(valkey.keys(keys.task("*"))))
                return job.ended()

            await auntil(look)
    assert 4 < most <= 8 + 8, "written lines that were not settled stay for a minute"
    assert job.read().status == "completed"
    assert len(job.lines("output")) == 50
    assert job.faults() == []


async def test_lines_of_which_few_fit_into_the_store_come_out(
    valkey: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes fill the window before their number fills a part of the files."""
    for name, size in (("expand.WINDOW_BYTES", 5000), ("results.PART_BYTES", 2000)):
        monkeypatch.setattr(f"producers.sweeper.batches.{name}", size)
    with Serving(valkey):
        job = Job(valkey, tmp_path, [GOOD | {"user": "x" * 1000}] * 12)
        async with sweeping(valkey_url, job, block=100, part=100):
            await auntil(job.ended)
    assert job.faults() == []
    assert len(job.lines("output")) == 12


def limited(valkey: Redis, tenant: str = "", **limits: Any) -> dict[str, str]:
    """Fields of a batch whose key, or tenant, has these limits."""
    if tenant:
        valkey.hset(keys.TENANT_LIMITS, tenant, json.dumps(limits))
        return {"tenant": tenant}
    key = Key("k" * 16, "acme", "a key", ("submit",), 0, "", limits=Limits(**limits))
    valkey.hset(keys.API_KEYS, key.id, key.to_json())
    return {"tenant": "acme", "principal": key.principal().to_json()}


def account_of(valkey: Redis) -> dict[bytes, bytes]:
    (name,) = valkey.keys(keys.account("*"))
    found: dict[bytes, bytes] = valkey.hgetall(name)
    return found


async def test_limits_hold_a_batch_back_and_do_not_stop_it(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    job = Job(valkey, tmp_path, [GOOD] * 10, **limited(valkey, rpm=4, max_in_flight=2))
    with Serving(valkey) as serving:
        async with sweeping(valkey_url, job):
            await auntil(lambda: len(serving.served) >= 4)
            assert job.read().count("line") <= 8, "those of two minutes at most"
            assert not job.ended()
            limited(valkey, rpm=100, max_in_flight=2)
            await auntil(job.ended)
    assert (job.faults(), len(job.lines("output"))) == ([], 10)
    account = account_of(valkey)
    assert [account[name] for name in (b"open", b"reserved", b"spent")] == [b"0", b"0", b"50"]


@pytest.mark.parametrize("tenant", ["", "acme"])
@pytest.mark.parametrize(
    ("limits", "completed", "error"),
    [
        ({"budget_tokens": 40}, 7, "insufficient_quota"),
        ({"budget_money": "0.0405"}, 7, "insufficient_quota"),
        ({"tpm": 6}, 0, "token_limit_exceeded"),
        ({"max_prompt": 2}, 0, "prompt_too_long"),
    ],
)
async def test_lines_that_a_budget_has_nothing_left_for_are_errors(
    valkey: Redis, valkey_url: str, tmp_path: Path, tenant: str, limits: dict[str, Any], completed: int, error: str
) -> None:
    price = (Decimal(1000), Decimal(1000), Decimal(1000))
    prices = Prices("EUR", {("tiny", "batch"): price}).to_json()
    job = Job(valkey, tmp_path, [GOOD] * 10, prices=prices, **limited(valkey, tenant, **limits))
    with Serving(valkey):
        async with sweeping(valkey_url, job):
            await auntil(job.ended)
    assert (job.faults(), len(job.lines("output"))) == ([], completed)
    assert {line["response"]["body"]["error"]["code"] for line in job.lines("error").values()} == {error}
    if completed:
        assert account_of(valkey)[b"spent"] == b"35"


async def test_a_line_that_names_no_output_fits_a_largest_output(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    job = Job(valkey, tmp_path, [{**GOOD, "max_tokens": None}], **limited(valkey, max_output=3))
    with Serving(valkey):
        async with sweeping(valkey_url, job):
            await auntil(job.ended)
    assert (job.faults(), len(job.lines("output"))) == ([], 1)


async def test_a_batch_without_prices_spends_no_budget_in_money(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    job = Job(valkey, tmp_path, [GOOD] * 2, **limited(valkey, budget_money="1"))
    async with sweeping(valkey_url, job):
        await auntil(job.ended)
    assert {line["response"]["status_code"] for line in job.lines("error").values()} == {403}


async def test_a_tenants_batches_share_a_window_and_anothers_has_its_own(
    valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    valkey.hset(keys.TENANT_LIMITS, "acme", json.dumps({"max_lines": 3}))
    first, second = (Job(valkey, tmp_path, [GOOD] * 6, tenant="acme") for _ in range(2))
    other = Job(valkey, tmp_path, [GOOD] * 6, tenant="other")

    def lines() -> int:
        return sum(job.read().count("line") for job in (first, second))

    async with sweeping(valkey_url, other, max_lines=5):
        await auntil(lambda: (lines(), other.read().count("line")) == (3, 5))
        for job in (first, second):
            for line in range(job.read().count("line")):
                run(valkey, protocol.cancel(batches.task_id(job.id, line)))
            run(valkey, batches.cancel(job.id))
        await auntil(lambda: first.ended() and second.ended())
    assert other.read().count("line") == 5


async def test_lines_whose_forms_take_long_hold_up_no_other_tenant(
    valkey: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their trials keep no thread that others' steps need."""
    over, begun = threading.Event(), threading.Event()

    def check(_: Trials, name: str, text: str) -> None:
        begun.set()
        over.wait(PATIENCE_S)

    monkeypatch.setattr(Trials, "check", check)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    slow = Job(valkey, tmp_path / "slow", [{**GOOD, "regex": "a&b"}] * 8, tenant="slow")
    async with sweeping(valkey_url, slow) as client:
        await auntil(begun.is_set)
        quick = Job(valkey, tmp_path / "slow", [GOOD] * 8, tenant="quick")
        await auntil(lambda: quick.read().count("line") == 8)
        assert slow.read().count("line") == 0
        over.set()
        await auntil(lambda: slow.read().count("line") == 8)
        assert client is not None


async def test_lines_that_are_refused_after_work_count_in_a_minute_and_wait_once_it_is_used_up(
    valkey: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that is never read to its end takes seconds."""
    tried = list[str]()

    def check(_: Trials, name: str, text: str) -> None:
        tried.append(text)
        raise stopped(name, "it never ends")

    monkeypatch.setattr(Trials, "check", check)
    forms = [{**GOOD, "regex": f"{'a' * 200}{number}"} for number in range(8)]
    job = Job(valkey, tmp_path, [GOOD, *forms], **limited(valkey, rpm=4))
    account = keys.account("k" * 16)

    def counted() -> tuple[int, int]:
        minute, requests = valkey.hmget(account, "minute", "requests")
        return int(minute or 0), int(requests or 0)

    async with sweeping(valkey_url, job):
        await auntil(lambda: counted()[1] >= 4)
        begun, _ = counted()
        await asyncio.sleep(0.5)  # many looks
        if counted()[0] == begun:
            assert len(tried) <= 4, "those before the fourth request was counted, and one that was begun meanwhile"
        limited(valkey, rpm=100)
        await auntil(lambda: job.read().count("line") == 9)
        await auntil(lambda: counted()[0] != begun or counted()[1] == 9)
    assert len(tried) == 8, "each once"
    assert job.read().count("failed") == 8


@pytest.mark.parametrize("where", [(line_endpoints, "READ_S"), (expand, "EXPAND_S")])
async def test_a_step_that_takes_long_goes_on_with_the_next_one(
    valkey: Redis, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    """A block may have one line then, and a step one block."""
    monkeypatch.setattr(*where, 0.0)
    job = Job(valkey, tmp_path, [GOOD, BAD, *[GOOD] * 7])
    async with sweeping(valkey_url, job):
        await auntil(lambda: job.read().count("line") == 9 and not valkey.zcard(keys.SUBMITTING))
    made = [line for line in range(9) if valkey.exists(keys.task(batches.task_id(job.id, line)))]
    assert made == [0, *range(2, 9)]


async def test_a_tenant_with_many_batches_gets_half_of_the_steps_and_the_others_their_turns() -> None:
    turns, held, done = Turns(2, 1), asyncio.Event(), list[str]()

    async def step(tenant: str) -> None:
        async with turns.turn(tenant):
            done.append(tenant)
            await held.wait()

    async with asyncio.TaskGroup() as group:
        for tenant in ["many"] * 5 + ["small", "third"]:
            group.create_task(step(tenant))
        await auntil(lambda: len(done) == 2)
        assert done == ["many", "small"]
        held.set()
    assert done[2] == "third", "it came after all of the first one's"
    assert len(done) == 7
    assert turns._tenants == {}
