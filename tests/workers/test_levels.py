"""Workers of two releases on one system: what only the later one can do is done by it, and waits for it."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import asdict
from typing import Any

import pytest

from producers import AsyncClient
from producers.admin.explain import Explanation, explain
from producers.broker.redis import keys as broker_keys
from producers.contract import keys, levels
from producers.contract.record import Record
from producers.store.waiting import Bounds, Room, pressure
from producers.sweeper.celery_results import CeleryResults
from producers.sweeper.queues import RetiredPools, UnservedTasks
from tests.workers.rig import MODEL, QUEUE, TIMES, Rig

NOVEL = {"metadata": {"novel": "1"}}
#: A worker of the next release; it computes as one of this release does.
NEXT: dict[str, Any] = {"times": TIMES | {"producers.contract.levels:LEVEL": 1}}
POOL = keys.Pool("stub", "v1", "stub")


@pytest.fixture(autouse=True)
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process (client, sweeper) is of the next release: tasks may be `novel`."""
    feature = levels.Feature(1, "9.9.0", lambda fields: "novel" in fields.get("metadata", {}))
    monkeypatch.setattr(levels, "FEATURES", [feature])
    monkeypatch.setattr(levels, "LEVEL", 1)


def test_a_queue_and_the_level_of_those_beside_it() -> None:
    for queue in (POOL.queue, POOL.version_queue):
        assert levels.beside(queue) == [queue, f"{queue}+1"]
        assert [levels.split(name) for name in levels.beside(queue)] == [(queue, 0), (queue, 1)]
    for name in ("penstock:queue:c++", "penstock:queue:a+1", f"{QUEUE}+0", f"{QUEUE}+01"):
        assert levels.split(name) == (name, 0)


def test_what_needs_the_next_release_is_done_by_it_alone_and_waits_for_it(rig: Rig) -> None:
    this = rig.worker()
    novel, usual = rig.submit(5, **NOVEL), rig.submit(5)
    rig.check(usual)
    assert [rig.status(task_id) for task_id in novel] == ["queued"] * 5
    assert rig.record(novel[0])["queue"] == f"{QUEUE}+1"
    assert _reasons(rig, novel[0]) == ["release_missing"]
    later = rig.worker(**NEXT)
    rig.check([*novel, *rig.submit(20)])
    assert {_ran(rig, task_id) for task_id in novel} == {later.name}
    assert this.process.poll() is None
    rig.check_nothing_left()


def test_what_the_next_release_began_goes_on_there(rig: Rig) -> None:
    """Workers of both are one pool, and another pool has a worker of the next one, too."""
    held = {"STUB_SEQS": 2, "STUB_HOLD_AT": 5}
    later = rig.worker(**held, **NEXT)
    novel = rig.submit(2, **NOVEL)
    rig.until(lambda: all(rig.tokens(task_id) == 5 for task_id in novel))
    rig.worker()
    rig.worker(STUB_FINGERPRINT="other", **NEXT)
    second = rig.begin_worker(**held, **NEXT)
    second.wait_ready()
    assert later.stop(signal.SIGQUIT) == 0
    rig.until(lambda: all(rig.status(task_id) == "in_progress" for task_id in novel))
    assert {_ran(rig, task_id) for task_id in novel} == {second.name}
    assert {rig.record(task_id)["fingerprint"] for task_id in novel} == {"stub"}
    rig.kill(second)
    rig.check(novel)
    assert {rig.record(task_id)["fingerprint"] for task_id in novel} == {"other"}
    rig.check_nothing_left()


@pytest.mark.parametrize("begun", [False, True])
def test_what_no_worker_can_do_ends_after_a_while_where_others_are_up(rig: Rig, begun: bool) -> None:
    if begun:
        later = rig.worker(STUB_HOLD_AT=5, **NEXT)
    else:
        rig.publish_card()
        rig.store.hset(keys.POOLS, POOL.queue, json.dumps(asdict(POOL)))
    (novel,) = rig.submit(1, **NOVEL)
    if begun:
        rig.until(lambda: rig.tokens(novel) == 5)
        rig.kill(later)

    async def sweep(times: int = 2) -> list[int]:
        async with AsyncClient(rig.url) as client:
            unserved = UnservedTasks(client, CeleryResults(client, rig.url), after_s=0.0)
            return [await unserved.sweep() for _ in range(times)]

    assert asyncio.run(sweep()) == [0, 0], "nobody is up: it waits"
    rig.worker()
    rig.until(lambda: rig.waiting(f"{QUEUE}+1") == 1)
    assert sum(asyncio.run(sweep())) == 1
    record = Record.parse(novel, rig.record(novel))
    assert record.status == ("incomplete" if begun else "failed")
    assert record.json("error")["code"] == "release_missing"
    assert "needs a worker of release 9.9.0" in record.json("error")["message"]
    assert not rig.waiting(f"{QUEUE}+1")


def test_a_task_is_ended_by_its_own_age(rig: Rig) -> None:
    """Workers of this release alone have been up for long when it is sent."""
    rig.publish_card()
    _lives(rig, "this", 0)

    async def sweep(patience_s: float) -> str | None:
        async with AsyncClient(rig.url) as client:
            unserved = UnservedTasks(client, CeleryResults(client, rig.url), after_s=patience_s)
            await unserved.sweep()
            unserved._since = dict.fromkeys(unserved._since, float("-inf"))
            await unserved.sweep()
            return rig.status(novel)

    (novel,) = rig.submit(1, **NOVEL)
    assert asyncio.run(sweep(600)) == "queued"
    assert asyncio.run(sweep(0)) == "failed"


def test_a_worker_of_another_pool_that_comes_up_meanwhile_keeps_its_tasks(rig: Rig) -> None:
    rig.publish_card()
    _lives(rig, "this", 0)
    (novel,) = rig.submit(1, **NOVEL)

    async def sweep() -> None:
        async with AsyncClient(rig.url) as client:
            recall = client.broker.recall

            async def starts(*about: Any) -> int:
                _lives(rig, "next", 1, keys.Pool("stub", "v1", "other"))
                return await recall(*about)

            client.broker.recall = starts  # type: ignore[method-assign]
            await UnservedTasks(client, CeleryResults(client, rig.url), after_s=0.0).sweep()

    asyncio.run(sweep())
    assert rig.status(novel) == "queued"


def test_a_plain_message_is_not_left_beside_where_nobody_reads(rig: Rig) -> None:
    rig.worker()
    later = _lives(rig, "later", 1)
    app = rig.sender()
    sent = str(app.send_task("penstock.generate", kwargs={"prompt": [1], "later": 1}, queue=MODEL).id)
    rig.until(lambda: rig.waiting(f"{QUEUE}+1") == 1)
    rig.store.delete(keys.lease(later))

    async def sweep() -> None:
        async with AsyncClient(rig.url) as client:
            await UnservedTasks(client, CeleryResults(client, rig.url), after_s=0.0).sweep()

    asyncio.run(sweep())
    rig.check([sent], "failed")
    assert app.AsyncResult(sent).state == "FAILURE"
    app.close()


def test_a_pool_with_tasks_beside_is_not_forgotten(rig: Rig) -> None:
    rig.publish_card()
    rig.store.hset(keys.POOLS, POOL.queue, json.dumps(asdict(POOL)))
    (novel,) = rig.submit(1, **NOVEL)
    rig.store.hset(keys.MODELS, "stub", json.dumps({"v": 1, "name": "stub", "version": "v2"}))

    async def sweep() -> int:
        async with AsyncClient(rig.url) as client:
            retired = RetiredPools(client, retire_after_s=0.0)
            return sum([(await retired.sweep()).pools for _ in range(2)])

    assert asyncio.run(sweep()) == 0
    rig.cancel(novel)
    assert asyncio.run(sweep()) in (0, 1)


def test_bounds_count_what_waits_beside(rig: Rig) -> None:
    bounds = Bounds(pool=10)
    for queue in (QUEUE, f"{QUEUE}+1"):
        rig.store.hset(keys.WAITING, f"default {queue}", 4)
    found = json.loads(Room(bounds).to_json(QUEUE, "default", ""))
    ((counts, fields, _, _),) = found
    assert sum(int(rig.store.hget(counts, field) or 0) for field in fields) == 8

    async def measured() -> int:
        async with AsyncClient(rig.url) as client:
            return (await pressure(client.store, QUEUE, bounds, 0)).tasks

    assert asyncio.run(measured()) == 8


def test_what_is_left_of_a_level_that_all_can_do_goes_to_the_versions_queue(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two releases later nobody reads its queue."""
    rig.publish_card()
    novel = rig.submit(2, **NOVEL)
    for name, value in (("SHARED", 1), ("EMPTIED", 1), ("FEATURES", [])):
        monkeypatch.setattr(levels, name, value)
    after = TIMES | {f"producers.contract.levels:{name}": 1 for name in ("LEVEL", "SHARED", "EMPTIED")}
    rig.worker(times=after)
    rig.check(novel)


def _lives(rig: Rig, name: str, level: int, pool: keys.Pool = POOL) -> str:
    """A worker that lives, as far as broker and store know."""
    incarnation = f"{name}.1"
    rig.store.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))
    rig.store.set(keys.lease(incarnation), json.dumps({"worker": name, "level": level, "release": f"{level}.0"}))
    rig.store.sadd(keys.workers(pool.queue), incarnation)
    rig.redis.hset(broker_keys.INCARNATIONS, incarnation, pool.queue)
    return incarnation


def test_a_plain_message_that_a_worker_cannot_read_is_left_to_one_of_a_later_release(rig: Rig) -> None:
    app = rig.sender()
    this = rig.worker()

    def send() -> str:
        return str(app.send_task("penstock.generate", kwargs={"prompt": [1], "later": 1}, queue=MODEL).id)

    first = send()
    rig.check([first], "failed")
    assert json.loads(rig.record(first)["error"])["code"] == "unknown_parameter"
    later = rig.worker(**NEXT)
    others = [send() for _ in range(8)]
    rig.check(others, "failed")  # this one cannot read it either, and no other is up
    assert {_ran(rig, task_id) for task_id in others} == {later.name}
    assert this.process.poll() is None
    app.close()


def _ran(rig: Rig, task_id: str) -> str:
    """The worker that runs it, or ran it last."""
    record = Record.parse(task_id, rig.record(task_id))
    owner = record.fields.get("owner") or [run.owner for run in record.runs.values()][-1]
    return owner.rpartition(".")[0]


def _explained(rig: Rig, task_id: str) -> Explanation:
    async def ask() -> Explanation:
        async with AsyncClient(rig.url) as client:
            return await explain(client.store, client.broker, Record.parse(task_id, rig.record(task_id)))

    return asyncio.run(ask())


def _reasons(rig: Rig, task_id: str) -> list[str]:
    return [reason.name for reason in _explained(rig, task_id).blocked_by]


def test_an_explanation_counts_tasks_of_other_levels_that_go_first(rig: Rig) -> None:
    rig.publish_card()
    _lives(rig, "next", 1)
    rig.submit(2, **NOVEL)
    rig.submit(3, tier="priority")
    rig.submit(5, tier="priority", **NOVEL)
    (novel,), (usual,) = rig.submit(1, **NOVEL), rig.submit(1)
    found = _explained(rig, novel)
    assert found.ahead == 2 + 3 + 5
    assert [reason.name for reason in found.blocked_by][:2] == ["better_tiers", "same_tier"]
    found = _explained(rig, usual)
    assert found.ahead == (2 + 1) + 3 + 5
    assert not found.ahead_is_exact
    assert [reason.message for reason in found.blocked_by][:2] == [
        "8 tasks of better tiers go first",
        "3 tasks of the tier default that need a later release go first",
    ]
    _lives(rig, "this", 0)  # which does not take what needs a later release, and may come to it at once
    assert _explained(rig, usual).ahead == 3
    assert _explained(rig, novel).ahead == 2 + 3 + 5
