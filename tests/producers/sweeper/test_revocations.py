"""Celery's `revoke`, heard by a sweeper while no worker is up."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from producers import AsyncClient
from producers.connection.script import run, text
from producers.contract import keys
from producers.store import protocol
from producers.sweeper.revocations import hear, revoked_ids
from tests.producers.conftest import POOL, QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S

PLAIN: dict[str, str | int] = {"model": "tiny", "queue": QUEUE, "tier": "default", "n": 1, "task": "{}", "nonce": ""}


@pytest.fixture
async def hearing(aclient: AsyncClient, valkey_url: str, valkey: Redis) -> AsyncIterator[Celery]:
    """A sweeper's ear, which listens; and a Celery application on the same server."""
    task = asyncio.create_task(hear(aclient, valkey_url))
    await until(lambda: valkey.pubsub_channels("*pidbox*"))
    app = Celery("sender", broker=valkey_url, set_as_current=False)
    yield app
    app.close()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def claim(worker: FakeWorker, task_id: str) -> protocol.Claimed:
    call = protocol.claim(task_id, f"claim of {task_id}", worker.incarnation, POOL, plain=PLAIN)
    return protocol.read_claim(task_id, run(worker.redis, call))


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)


async def test_a_plain_task_that_nobody_has_seen_is_cancelled_when_a_worker_gets_it(
    hearing: Celery, valkey: Redis, worker: FakeWorker
) -> None:
    await asyncio.to_thread(hearing.control.revoke, "p")
    await until(lambda: valkey.zscore(keys.REVOKED, "p"))
    claimed = claim(worker, "p")
    assert claimed.answer == "settle"
    assert claimed.record is not None
    assert claimed.record.status == "cancelled"
    assert claim(worker, "another").answer == "go"


async def test_every_form_of_revoking_by_id_is_heard(hearing: Celery, valkey: Redis) -> None:
    def revoke() -> None:
        hearing.control.revoke(["a", "b"], terminate=True, signal="SIGKILL")
        hearing.control.terminate("c")
        hearing.control.broadcast("terminate", arguments={"signal": "SIGTERM", "task_id": ["d"]})
        hearing.AsyncResult("e").revoke()
        hearing.control.revoke("named", destination=["one@host"])
        hearing.control.revoke_by_stamped_headers({"h": ["x"]})
        hearing.control.broadcast("shutdown")
        hearing.control.revoke("last")

    await asyncio.to_thread(revoke)
    await until(lambda: valkey.zscore(keys.REVOKED, "last"))
    assert valkey.zrange(keys.REVOKED, 0, -1) == [b"a", b"b", b"c", b"d", b"e", b"last"]


async def test_a_task_that_waits_is_cancelled_at_once_and_one_that_runs_is_its_worker_s(
    hearing: Celery, aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    waiting = await aclient.submit(model="tiny", prompt=[1])
    running = await aclient.submit(model="tiny", prompt=[1])
    worker.claim(running.id)
    await asyncio.to_thread(hearing.control.revoke, [running.id, waiting.id])
    await until(lambda: valkey.hget(keys.task(waiting.id), "status") == b"cancelled")
    assert valkey.hget(keys.task(running.id), "status") == b"in_progress"
    assert not valkey.hexists(keys.task(running.id), "cancel")


async def test_it_answers_nothing(hearing: Celery) -> None:
    assert await asyncio.to_thread(lambda: hearing.control.ping(timeout=0.3)) == []
    assert await asyncio.to_thread(lambda: hearing.control.inspect(timeout=0.3).active()) is None


async def test_it_goes_on_hearing_after_its_connection_was_lost(hearing: Celery, valkey: Redis) -> None:
    valkey.client_kill_filter(_type="pubsub")
    async with asyncio.timeout(PATIENCE_S):
        # Redis keeps no message: what is sent before it hears again is lost.
        while not valkey.zscore(keys.REVOKED, "p"):
            await asyncio.to_thread(hearing.control.revoke, "p")
            await asyncio.sleep(0.1)


def test_only_the_last_ids_are_noted_and_each_for_a_time(valkey: Redis) -> None:
    for task_id in ("a", "b", "c"):
        assert text(run(valkey, protocol.revoke(task_id, limit=2))) == "noted"
        assert valkey.zcard(keys.REVOKED) <= 2
    assert valkey.zrange(keys.REVOKED, 0, -1) == [b"b", b"c"]
    run(valkey, protocol.revoke("short", seconds=-1))
    run(valkey, protocol.revoke("d"))
    assert b"short" not in valkey.zrange(keys.REVOKED, 0, -1)


def envelope(**changes: Any) -> dict[str, Any]:
    command = {"method": "revoke", "arguments": {"task_id": "a"}, "destination": None, "pattern": None, "matcher": None}
    body = base64.b64encode(json.dumps({**command, **changes}).encode()).decode()
    properties = {"body_encoding": "base64"}
    return {"body": body, "content-type": "application/json", "content-encoding": "utf-8", "properties": properties}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"[" * 100_000,
        json.dumps({**envelope(), "body": "%%%"}).encode(),
        json.dumps({**envelope(), "body": None}).encode(),
        json.dumps({**envelope(), "content-type": "application/x-python-serialize"}).encode(),
        json.dumps({**envelope(), "properties": None}).encode(),
        json.dumps(envelope(method=["revoke"])).encode(),
        json.dumps(envelope(arguments=None)).encode(),
        json.dumps(envelope(arguments={"task_id": [7, None, "", "\ud800", ["b"]]})).encode(),
        json.dumps(envelope(pattern="one@*", matcher="glob")).encode(),
    ],
)
def test_whatever_else_comes_ends_nothing(payload: bytes) -> None:
    assert revoked_ids(payload) == []
    assert revoked_ids(json.dumps(envelope()).encode()) == ["a"]
