"""A load over real sockets: to a gateway with a fake worker behind it, and to servers that misbehave."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin import keys as api_keys
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.store.access.audit import Actor
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door, until
from tests.workers.cli.conftest import Answer, Scripted, door, model, open_door, scripted, send, worker
from workers.trials.bench.connection import Broken, Connections
from workers.trials.bench.load import Load, Request, Sample, drive

__all__ = ["door", "model", "open_door", "scripted", "worker"]

LOAD = Load("tiny", vocab_size=2048, requests=12, prompt_tokens=5, output_tokens=4)


@contextmanager
def serving(worker: FakeWorker, pieces: tuple[str, ...] = ("a", "b", "c")) -> Iterator[list[str]]:
    """A worker that serves whatever comes; the ids of what it served."""
    served: list[str] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            task_id = worker.take(QUEUE)
            if task_id is None:
                over.wait(0.002)
            else:
                worker.serve(task_id, pieces)
                served.append(task_id)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield served
    over.set()
    thread.join(60)


def run(url: str, requests: list[Request], **options: object) -> list[Sample]:
    return asyncio.run(drive(url, requests, **{"concurrency": None, **options}))[0]  # type: ignore[arg-type]


def test_every_request_is_followed_to_its_end(door: Door, worker: FakeWorker) -> None:
    with serving(worker) as served:
        samples = run(door.url, list(LOAD.schedule()), concurrency=3)
    assert [sample.error for sample in samples] == [None] * 12
    assert sorted(sample.task_id for sample in samples) == sorted(served)
    assert {len(sample.tokens) for sample in samples} == {3}
    for sample in samples:
        times = [sample.due, sample.sent, *sample.tokens, sample.ended]
        assert times == sorted(times)
        assert sample.prompt_tokens == 3
        assert sample.queue_wait is not None
        assert sample.queue_wait >= 0


def test_a_closed_loop_keeps_to_its_concurrency(door: Door, worker: FakeWorker, valkey: Redis) -> None:
    most = 0

    def note(sample: Sample) -> None:
        nonlocal most
        waiting = valkey.llen(broker_keys.tier_list(QUEUE, "default"))
        most = max(most, int(waiting))  # type: ignore[arg-type]

    with serving(worker):
        samples = run(door.url, list(LOAD.schedule()), concurrency=2, note=note)
    assert most <= 2
    # Each was sent when one before it had ended.
    ends = sorted(sample.ended for sample in samples)
    assert all(sample.sent >= ends[k] for k, sample in enumerate(samples[2:]))


def test_an_open_loop_sends_when_due_whatever_became_of_others(door: Door) -> None:
    """No worker: nothing ever ends, and everything is sent all the same."""
    requests = list(Load("tiny", 2048, 5, rate=200.0, prompt_tokens=4).schedule())
    samples = run(door.url, requests, silence=0.5)
    assert [sample.due for sample in samples] == [ask.due for ask in requests]
    assert {sample.error for sample in samples} == {"silence"}


def test_latency_counts_from_when_it_was_due_also_where_there_was_no_room(door: Door, worker: FakeWorker) -> None:
    requests = list(Load("tiny", 2048, 6, rate=1e6, prompt_tokens=4).schedule())
    with serving(worker):
        samples = run(door.url, requests, concurrency=1)
    assert max(sample.due for sample in samples) < 0.001
    assert [sample.sent for sample in samples[1:]] >= [sample.ended for sample in samples[:-1]]


def test_a_bench_ends_with_its_duration(door: Door, worker: FakeWorker) -> None:
    requests = [
        Request(k, due, {"model": "tiny", "prompt": "x", "tier": "flex"}) for k, due in enumerate([0.0, 0.01, 500.0])
    ]
    with serving(worker):
        assert len(run(door.url, requests, duration=400.0)) == 2


def test_nothing_is_sent_once_the_duration_is_over_also_where_there_was_no_room_before(door: Door) -> None:
    """No worker: the first is given up after the duration, and makes room for the second then."""
    requests = [Request(k, 0.0, {"model": "tiny", "prompt": "x", "tier": "flex"}) for k in range(2)]
    assert len(run(door.url, requests, concurrency=1, duration=1.0, silence=1.5)) == 1


def test_what_the_gateway_refuses_is_an_error_by_its_code(door: Door) -> None:
    requests = [Request(0, 0.0, {"model": "nobody", "prompt": "x", "tier": "default"})]
    requests += [Request(1, 0.0, {"model": "tiny", "prompt": "x", "tier": "default", "temperature": -1})]
    assert [sample.error for sample in run(door.url, requests)] == ["404 model_not_found", "400 invalid_value"]


def test_a_task_that_fails_is_an_error(door: Door, worker: FakeWorker) -> None:
    def fail() -> None:
        task_id = until(lambda: worker.take(QUEUE))
        worker.claim(task_id)
        worker.finish(task_id, [0], status="failed", error={"code": "engine_error", "message": "m"})

    threading.Thread(target=fail, daemon=True).start()
    (sample,) = run(door.url, list(Load("tiny", 2048, 1, prompt_tokens=4).schedule()))
    assert sample.error == "engine_error"


def test_to_stop_a_bench_cancels_what_is_under_way(door: Door, valkey: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[drive.__module__], "CANCEL_S", 60.0)

    async def stopped() -> None:
        bench = asyncio.create_task(drive(door.url, LOAD.schedule(), concurrency=3))
        # It knows of a task once it reads its events.
        await asyncio.to_thread(until, lambda: len(valkey.pubsub_channels(keys.channel("[^@]*"))) == 3)
        bench.cancel()
        await asyncio.wait((bench,))
        assert bench.cancelled()

    asyncio.run(stopped())
    statuses = [valkey.hget(key, "status") for key in valkey.scan_iter("penstock:task:*")]
    assert statuses == [b"cancelled"] * 3


class TestConnections:
    def answer(self, raw: bytes) -> Answer:
        def write(request: BaseHTTPRequestHandler) -> None:
            request.wfile.write(raw)
            request.close_connection = True

        return write

    async def body(self, url: str) -> tuple[int, bytes]:
        async with Connections(url).request("GET", "/x") as answer:
            return answer.status, b"".join([piece async for piece in answer.body()])

    @pytest.mark.parametrize(
        ("raw", "status", "body"),
        [
            (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", 200, b"abc"),
            (b"HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x\r\nc\r\n0\r\n\r\n", 503, b"abc"),
            (b"HTTP/1.0 200 OK\r\n\r\nabc", 200, b"abc"),
            (b"HTTP/1.1 204 None\r\n\r\n", 204, b""),
        ],
    )
    async def test_every_kind_of_body_is_read(self, scripted: Scripted, raw: bytes, status: int, body: bytes) -> None:
        scripted.answers = [self.answer(raw)]
        assert await self.body(scripted.url) == (status, body)

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"SSH-2.0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        ],
    )
    async def test_what_is_no_http_is_broken(self, scripted: Scripted, raw: bytes) -> None:
        scripted.answers = [self.answer(raw)]
        with pytest.raises(Broken):
            await self.body(scripted.url)

    async def test_requests_carry_the_key_of_the_environment(
        self, open_door: Callable[..., Door], valkey_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = open_door(auth="keys").url
        monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
        async with Connections(url).request("GET", "/v1/models") as answer:
            assert answer.status == 401
        async with AsyncRedis.from_url(valkey_url) as store:
            _, key = await api_keys.create(store, {"tenant": "acme"}, Actor("test"))
        monkeypatch.setenv("PENSTOCK_API_KEY", key)
        async with Connections(url).request("GET", "/v1/models") as answer:
            assert answer.status == 200

    async def test_nothing_listening_is_broken(self) -> None:
        with pytest.raises(Broken):
            await self.body("http://127.0.0.1:1")

    async def test_a_connection_is_used_again(self, door: Door) -> None:
        connections = Connections(door.url)
        sockets = set()
        for _ in range(3):
            async with connections.request("GET", "/v1/models") as answer:
                assert (await answer.json())["data"][0]["id"] == "tiny"
            sockets.add(connections._idle[0][2].get_extra_info("sockname"))
        connections.close()
        assert len(sockets) == 1

    async def test_one_whose_answer_was_not_read_is_not_used_again(self, door: Door) -> None:
        connections = Connections(door.url)
        for _ in range(2):
            async with connections.request("GET", "/v1/models") as answer:
                assert answer.status == 200
            assert connections._idle == []


def test_a_gateway_that_talks_nonsense_is_an_error(scripted: Scripted) -> None:
    scripted.answers = [send(202, b'{"no": "id"}')]
    (sample,) = run(scripted.url, list(Load("m", 9, 1).schedule()))
    assert sample.error == "'id'"
