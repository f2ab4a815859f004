"""What is final comes to rest, also where nobody brings its message; and what needs its message waits for it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import Celery, states
from celery.exceptions import TaskRevokedError
from redis import Redis

from producers import AsyncClient, TaskFailed
from producers.connection.script import run, text
from producers.contract import keys
from producers.store import protocol
from producers.sweeper import tasks
from producers.sweeper.celery_results import CeleryResults
from producers.sweeper.tasks import Orphans
from tests.producers.conftest import POOL, QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S

PLAIN: dict[str, str | int] = {"model": "tiny", "queue": QUEUE, "tier": "default", "n": 1, "task": "{}", "nonce": ""}


def settled(valkey: Redis, task_id: str) -> bool:
    return bool(valkey.hexists(keys.task(task_id), "settled"))


def plain(worker: FakeWorker, task_id: str, count: int = 0) -> None:
    """A plain Celery task that runs."""
    call = protocol.claim(task_id, f"claim of {task_id}", worker.incarnation, POOL, plain=PLAIN)
    assert text(run(worker.redis, call)[0]) == "go"
    worker.claims[task_id] = f"claim of {task_id}"
    if count:
        worker.append(task_id, 0, ["x"] * count)


async def test_a_task_cancelled_while_it_was_queued_is_settled_and_its_message_finds_it_done(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    assert await handle.cancel()
    assert not settled(valkey, handle.id)
    assert await aclient.run(Orphans(age_ms=0).sweep()) == 1
    assert settled(valkey, handle.id)
    assert 0 < valkey.ttl(keys.task(handle.id)) < valkey.ttl(keys.stream(handle.id))
    assert not valkey.zcard(keys.UNSETTLED)
    assert worker.claim(worker.take(QUEUE) or "").answer == "done"


async def test_one_whose_worker_died_before_its_tracer_is_settled(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    worker.claim(handle.id)
    worker.append(handle.id, 0, ["a"])
    worker.finish(handle.id, [1])
    sweeping = Orphans(age_ms=0)
    assert await aclient.run(sweeping.sweep()) == 0, "its owner lives, and is about to"
    worker.die()
    for _ in range(tasks.ALL_EVERY):
        await aclient.run(sweeping.sweep())
    assert settled(valkey, handle.id)
    assert (await handle.result(PATIENCE_S)).text == "a"


async def test_what_is_young_is_left_to_its_worker(aclient: AsyncClient, valkey: Redis) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    await handle.cancel()
    assert await aclient.run(Orphans(age_ms=3_600_000).sweep()) == 0
    assert not settled(valkey, handle.id)


async def test_a_plain_task_is_left_to_its_message_for_a_week_then_given_up(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plain(worker, "p")
    worker.finish("p", [0])
    worker.die()
    waiting: list[str] = []
    assert await aclient.run(Orphans(age_ms=0, waiting=waiting.append).sweep()) == 0
    assert waiting == ["p"]
    later = FakeWorker(valkey, "later")
    assert later.claim("p").answer == "settle", "whoever gets the message runs the tracer, with the links"
    run(valkey, protocol.release("p", later.claims["p"]))
    valkey.zincrby(keys.UNSETTLED, -tasks.PATIENCE_MS - 1000, "p")
    assert await aclient.run(Orphans(age_ms=0).sweep()) == 1
    assert "links" in caplog.text


async def test_a_task_given_up_keeps_its_message_for_the_dead_letter(aclient: AsyncClient, valkey: Redis) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    for k in range(protocol.MAX_DEATHS + 1):
        worker = FakeWorker(valkey, f"w{k}")
        worker.claim(handle.id)
        worker.die()
    assert (await handle.status()).json("error")["code"] == "dead_lettered"
    assert await aclient.run(Orphans(age_ms=0).sweep()) == 0
    assert FakeWorker(valkey).claim(handle.id).answer == "settle"


async def test_what_settled_or_went_meanwhile_leaves_the_index(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    done = await aclient.submit(model="tiny", prompt=[1])
    worker.serve(done.id)
    valkey.zadd(keys.UNSETTLED, {"nobody's": 1, done.id: 2, handle.id: 3})
    before = valkey.hgetall(keys.task(handle.id))
    await aclient.run(Orphans(age_ms=0).sweep())
    assert not valkey.zcard(keys.UNSETTLED)
    assert valkey.hgetall(keys.task(handle.id)) == before, "a task that waits is no orphan"


async def test_many_that_wait_hide_none_of_the_rest(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "PAGE", 3)
    for k in range(8):
        plain(worker, f"p{k}")
        worker.finish(f"p{k}", [0])
    ids = [(await aclient.submit(model="tiny", prompt=[1])).id for _ in range(5)]
    valkey.delete(keys.task("p3"))
    valkey.set(keys.task("p3"), "no record")
    for task_id in ids:
        run(valkey, protocol.cancel(task_id))
    worker.die()
    sweeping = Orphans(age_ms=0)
    assert await aclient.run(sweeping.sweep()) == 5
    assert valkey.zcard(keys.UNSETTLED) == 8


# ---- the results of plain tasks -----------------------------------------------------------------------------------


@pytest.fixture
def celery_app(valkey_url: str) -> Celery:
    return Celery("caller", broker=valkey_url, backend=valkey_url, set_as_current=False)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # by Celery
async def test_who_waits_for_a_plain_task_is_told_though_nobody_has_its_message(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, worker: FakeWorker, celery_app: Celery
) -> None:
    for name in ("fine", "failed", "cancelled", "known"):
        plain(worker, name, 2)
    worker.finish("fine", [2])
    worker.finish("failed", [2], status="failed", error={"code": "engine_error", "message": "It broke."})
    worker.finish("known", [2])
    worker.die()
    assert (await aclient.get("cancelled").cancel()) is True
    celery_app.backend.store_result("known", {"told": "before"}, states.SUCCESS)
    results = CeleryResults(aclient, valkey_url)
    await aclient.run(Orphans(age_ms=0, waiting=results.wait).sweep())
    assert await results.store_waiting() == 3
    told: dict[str, Any] = {name: celery_app.AsyncResult(name) for name in ("fine", "failed", "cancelled", "known")}
    assert told["fine"].get(timeout=PATIENCE_S)["text"] == "xx"
    with pytest.raises(Exception, match="It broke") as raised:
        told["failed"].get(timeout=PATIENCE_S)
    assert isinstance(raised.value, TaskFailed)
    with pytest.raises(TaskRevokedError):
        told["cancelled"].get(timeout=PATIENCE_S)
    assert told["known"].get(timeout=PATIENCE_S) == {"told": "before"}
    assert not any(settled(valkey, name) for name in told), "their links still wait for their messages"
    await aclient.run(Orphans(age_ms=0, waiting=results.wait).sweep())
    assert await results.store_waiting() == 0


async def test_what_cannot_be_settled_hides_nobody_and_is_not_tried_for_ever(
    aclient: AsyncClient, valkey: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    broken, fine = [(await aclient.submit(model="tiny", prompt=[1])).id for _ in range(2)]
    for task_id in (broken, fine):
        await aclient.get(task_id).cancel()
    valkey.delete(keys.task(broken))
    valkey.set(keys.task(broken), "no record")
    valkey.zadd(keys.UNSETTLED, {broken: 1, fine: 2})
    patient = Orphans(age_ms=0, patience_ms=2**52)
    assert await aclient.run(patient.sweep()) == 1
    assert await aclient.run(patient.sweep()) == 0
    assert valkey.zrange(keys.UNSETTLED, 0, -1) == [broken.encode()]
    assert await aclient.run(Orphans(age_ms=0).sweep()) == 0
    assert not valkey.exists(keys.UNSETTLED)
    assert f"task {broken} is final and could not be settled" in caplog.text


@pytest.mark.parametrize("ttl", ["x", "", "1.5", "inf", "nan"])
async def test_a_life_that_is_none_is_the_usual_one(aclient: AsyncClient, valkey: Redis, ttl: str) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    await handle.cancel()
    valkey.hset(keys.task(handle.id), "ttl", ttl)
    assert await aclient.run(Orphans(age_ms=0).sweep()) == 1
    assert 86_000 < valkey.ttl(keys.task(handle.id)) <= 86_400
