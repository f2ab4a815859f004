"""Messages of kinds that this release's workers do not know: they wait for a later release's, and no longer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from producers import AsyncClient
from producers.admin.fleet import read_fleet
from producers.broker.redis import keys as broker_keys
from producers.contract import keys, levels
from producers.sweeper import queues
from producers.sweeper.celery_results import CeleryResults
from producers.sweeper.queues import OrphanedQueues, UnservedTasks
from tests.waiting import PATIENCE_S
from tests.workers.rig import MODEL, QUEUE, TIMES, Rig

NEXT: dict[str, Any] = {"times": TIMES | {"producers.contract.levels:LEVEL": levels.LEVEL + 1}}
KNOWS: dict[str, Any] = NEXT | {"WORKER_PLUGINS": "tests.workers.plugins:a_later_kind"}
ASIDE, FURTHER = (f"{QUEUE}+{level}" for level in levels.above())


@pytest.fixture
def app(rig: Rig) -> Iterator[Celery]:
    with rig.sender() as app:
        yield app


def later(app: Celery, name: str = "penstock.later") -> Any:
    return app.send_task(name, (2,), queue=MODEL)


def sweep(rig: Rig, after_s: float = 0.0, times: int = 1) -> int:
    async def sweeps() -> int:
        async with AsyncClient(rig.url, rig.store_url) as client:
            swept = UnservedTasks(client, CeleryResults(client, rig.store_url), after_s)
            await OrphanedQueues(client).sweep()
            return sum([await swept.sweep() for _ in range(times)])

    return asyncio.run(sweeps())


def test_a_later_kind_is_done_by_the_next_release_and_waits_for_it(rig: Rig, app: Celery) -> None:
    this = rig.worker()
    results = [later(app) for _ in range(5)]
    rig.until(lambda: rig.waiting(ASIDE) == 5)
    assert sweep(rig, after_s=600.0, times=3) == 0
    rig.check(rig.submit(3))
    assert {result.state for result in results} == {"PENDING"}
    assert rig.dead() == []
    assert rig.redis.hgetall(broker_keys.REAPED) == {}
    rig.worker(**KNOWS)
    assert [result.get(timeout=PATIENCE_S) for result in results] == [3] * 5
    assert this.process.poll() is None
    rig.check_nothing_left()


def test_no_worker_takes_back_what_it_put_aside(rig: Rig, app: Celery) -> None:
    """Nor does the next release's, which does not know it either."""
    rig.worker()
    misspelt = later(app, "penstock.generat")
    rig.until(lambda: rig.waiting(ASIDE) == 1)
    rig.check(rig.submit(3))
    assert sweep(rig, after_s=600.0, times=3) == 0
    assert int(rig.redis.get(broker_keys.DELIVERIES)) == 4
    second = rig.worker(**NEXT)
    rig.until(lambda: rig.waiting(FURTHER) == 1)
    rig.check(rig.submit(3))
    assert sweep(rig, after_s=600.0, times=3) == 0
    assert int(rig.redis.get(broker_keys.DELIVERIES)) == 8
    second.stop()  # and is taken back: what it put aside is not left
    assert rig.waiting(FURTHER) == 1
    assert sweep(rig) == 1
    assert "penstock.generat" in str(misspelt.get(timeout=PATIENCE_S, propagate=False))
    rig.check_nothing_left()


def test_what_nobody_knows_ends_after_a_while_and_is_kept(rig: Rig, app: Celery) -> None:
    worker = rig.worker()
    result = later(app)
    rig.until(lambda: rig.waiting(ASIDE) == 1)
    assert rig.store.keys(keys.task("*")) == []
    assert sweep(rig) == 1
    error = result.get(timeout=PATIENCE_S, propagate=False)
    assert result.state == "FAILURE"
    assert "No worker that is up knows 'penstock.later'" in str(error)
    assert "release_missing" in str(error.args)
    (letter,) = rig.dead()
    assert letter["reason"].startswith("release_missing")
    assert json.loads(letter["message"])["headers"]["id"] == result.id
    assert (sweep(rig), len(rig.dead())) == (0, 1)
    assert worker.process.poll() is None
    rig.check_nothing_left()


def test_it_stays_aside_where_another_message_goes_back(rig: Rig, app: Celery) -> None:
    """A task that a later release's worker left, which this one can fail: its message alone goes back."""
    rig.worker()
    result = later(app)
    rig.until(lambda: rig.waiting(ASIDE) == 1)
    other = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "later": 1}, queue="elsewhere")
    rig.redis.rename("elsewhere", ASIDE + "-")
    (message,) = rig.redis.lrange(ASIDE + "-", 0, -1)
    rig.redis.delete(ASIDE + "-")
    rig.redis.lpush(ASIDE, message)
    before = int(rig.redis.get(broker_keys.DELIVERIES))

    async def ends() -> None:
        async with AsyncClient(rig.url) as client:
            swept = UnservedTasks(client, CeleryResults(client, rig.url), after_s=600.0)
            await swept.sweep()
            swept._since = dict.fromkeys(swept._since, float("-inf"))
            await swept.sweep()

    asyncio.run(ends())
    rig.check([other.id], "failed")
    assert result.state == "PENDING"
    assert rig.waiting(ASIDE) == 1
    assert int(rig.redis.get(broker_keys.DELIVERIES)) == before + 1


def test_it_waits_where_nobody_is_up(rig: Rig, app: Celery) -> None:
    worker = rig.worker()
    result = later(app)
    rig.until(lambda: rig.waiting(ASIDE) == 1)
    worker.stop()
    assert sweep(rig, times=3) == 0
    assert result.state == "PENDING"
    assert rig.waiting(ASIDE) == 1


def test_a_sweeper_that_was_killed_after_the_result_leaves_the_letter_to_the_next(
    rig: Rig, app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.worker()
    result = later(app)
    rig.until(lambda: rig.waiting(ASIDE) == 1)
    fail = CeleryResults.fail

    async def dies(*told: Any) -> None:
        await fail(*told)
        raise ConnectionError

    monkeypatch.setattr(CeleryResults, "fail", dies)
    with pytest.raises(ConnectionError):
        sweep(rig)
    monkeypatch.undo()
    stored = rig.store.get(keys.celery_result(result.id))
    assert result.state == "FAILURE"
    assert sweep(rig) == 1
    assert rig.store.get(keys.celery_result(result.id)) == stored
    assert len(rig.dead()) == 1


def test_more_than_may_wait_end_at_once(rig: Rig, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "KINDS", 3)
    rig.worker()
    results = [later(app) for _ in range(8)]
    rig.until(lambda: rig.waiting(ASIDE) == 8)
    assert sweep(rig, after_s=600.0, times=2) == 5
    assert sorted(result.state for result in results) == ["FAILURE"] * 5 + ["PENDING"] * 3


def test_what_waits_aside_is_shown_and_what_does_not_is_not(rig: Rig, app: Celery) -> None:
    rig.worker()
    later(app)
    rig.until(lambda: rig.waiting(ASIDE) == 1)

    async def read() -> dict[str, int]:
        async with AsyncClient(rig.url) as client:
            return {
                pool.name: sum(pool.queued.values()) for pool in (await read_fleet(client.store, client.broker)).pools
            }

    beside = {name: count for name, count in asyncio.run(read()).items() if "+" in name}
    assert beside == {ASIDE.removeprefix(keys.model_queue("")): 1}


def test_its_workers_deaths_count_as_ever(rig: Rig, app: Celery) -> None:
    """Condemned, it is a dead letter, whatever its kind."""
    worker = rig.worker()
    result = app.send_task("penstock.later", (2,), queue="elsewhere")
    rig.redis.hset(broker_keys.REAPED, result.id, 10)
    rig.redis.rename("elsewhere", MODEL)
    rig.until(rig.dead)
    (letter,) = rig.dead()
    assert "died" in letter["reason"]
    rig.until(lambda: result.state == "FAILURE")
    assert rig.waiting(ASIDE) == 0
    assert worker.process.poll() is None


def test_a_message_whose_result_nobody_could_store_is_refused_as_ever(rig: Rig) -> None:
    """Its id cannot be part of a key, so its sender could not be told later."""
    rig.worker()
    headers = {"id": "a\ud800", "task": "penstock.later", "lang": "py", "argsrepr": "()", "kwargsrepr": "{}"}
    properties = {
        "delivery_info": {"exchange": "", "routing_key": MODEL},
        "delivery_tag": "x",
        "body_encoding": "base64",
    }
    message = {"body": "W1tdLCB7fSwge31d", "headers": headers, "properties": properties}
    rig.redis.lpush(MODEL, json.dumps({**message, "content-type": "application/json", "content-encoding": "utf-8"}))
    rig.until(rig.dead)
    assert rig.waiting(ASIDE) == 0


def test_another_unknown_name_is_refused_in_one_line(rig: Rig, app: Celery) -> None:
    worker = rig.worker()
    before = len(worker.log.read_text())
    result = later(app, "app.unheard_of")
    rig.until(rig.dead)
    rig.until(lambda: result.state == "FAILURE")
    assert rig.waiting(ASIDE) == 0
    (line,) = [line for line in worker.log.read_text()[before:].splitlines() if "reload" not in line]
    assert "no task of that name" in line
    assert all(name in line for name in (result.id, "app.unheard_of"))
