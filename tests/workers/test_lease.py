"""A worker whose lease lapsed is dead to the others: it drops all it held and begins a new life, under a new name."""

from __future__ import annotations

import json
import signal
from typing import Any

from redis import Redis

from producers.contract import keys
from tests.processes import Worker
from tests.waiting import PATIENCE_S
from tests.workers.rig import TIMES, Rig, rig, two_servers

#: How long a worker that finds the servers back waits for the others to say that they live: a quarter of a lease (s).
PAUSE = 3.0


def test_a_long_lease_is_renewed_more_often_than_four_times(rig: Rig) -> None:
    """What others left, and what comes due, is looked for as often: nobody waits for a quarter of minutes."""
    (life,) = rig.worker(times=TIMES | {"workers.leases.housekeeper:ROUND_S": 1.0}).incarnations
    rig.store.pexpire(keys.lease(life), 200_000)
    rig.until(lambda: rig.store.pttl(keys.lease(life)) > 200_000)


def test_stopped_for_longer_than_its_lease(rig: Rig) -> None:
    """Meanwhile another has its tasks; woken, it appends nothing to their streams, and goes on under a new name.

    Whoever takes a task from a worker that does not answer must count it dead: it cannot know better.
    """
    first = rig.worker(STUB_HOLD_AT=50)
    ids = rig.begun(8, more_than=5, max_tokens=150)
    (old,) = first.incarnations
    first.suspend()
    rig.lapse(first)
    second = rig.worker(STUB_STEP_S=0.01)
    rig.until(lambda: {rig.record(task_id)["deaths"] for task_id in ids} == {"1"})
    first.resume()
    rig.until(lambda: first.incarnations and old not in first.incarnations)
    rig.check(ids)
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"1"}
    late = rig.fill(200)
    rig.check(late)
    assert first.stop() == second.stop() == 0
    rig.check_nothing_left()


def test_a_server_that_stood_still_killed_nobody() -> None:
    """All leases lapse, and everybody lives: each says so before anybody takes a task up, so no death is counted."""
    with rig(**{"enable-debug-command": "local"}) as made:
        _sleeps_and_goes_on(made)


def _sleeps_and_goes_on(rig: Rig) -> None:
    options = {"STUB_STEP_S": 0.01, "STUB_SEQS": 8, "max_deaths": 1, "lease": 4 * PAUSE}
    options["times"] = TIMES | {"workers.leases.housekeeper:ROUND_S": PAUSE}
    first = rig.worker(**options)
    ids = rig.fill(16, max_tokens=200)
    waiting = rig.fill(4, max_tokens=200)
    rig.url = rig.store_url = f"{rig.url}?socket_timeout=60"  # while it starts, it would not wait for so long
    second = rig.begin_worker(**options)
    _sleep(rig, first)
    rig.until(lambda: second.incarnations)
    rig.until(lambda: all(rig.tokens(task_id) > 5 for task_id in ids))
    _sleep(rig, first, second)
    rig.check(ids + waiting)
    assert {rig.record(task_id)["deaths"] for task_id in ids + waiting} == {"0"}
    assert first.stop() == second.stop() == 0
    rig.check_nothing_left()


def _sleep(rig: Rig, *workers: Worker) -> None:
    """The server answers nobody, while leases lapse that were about to; until all workers have begun anew."""
    old = [worker.incarnations for worker in workers]
    with Redis.from_url(rig.url, socket_timeout=60) as patient, patient.pipeline(transaction=True) as pipe:
        for name in rig.redis.keys(keys.lease("*")):
            pipe.pexpire(name, 1)
        pipe.execute_command("DEBUG", "SLEEP", 2.2 * PAUSE)
        pipe.execute()
    rig.until(lambda: all(w.incarnations and w.incarnations != before for w, before in zip(workers, old, strict=True)))


def test_the_leases_may_lapse_apart() -> None:
    """One on the broker, one on the store: either gone, the life is over and the other lease is given up."""
    with two_servers() as rig:
        worker = rig.worker(STUB_STEP_S=0.01)
        for server in (rig.redis, rig.store):
            ids = rig.submit(6, max_tokens=100)
            rig.until(lambda ids=ids: all(rig.tokens(task_id) > 3 for task_id in ids))
            (old,) = worker.incarnations
            server.delete(keys.lease(old))
            rig.until(lambda old=old: worker.incarnations and old not in worker.incarnations)
            assert not rig.redis.exists(keys.lease(old))
            rig.check(ids)
        assert worker.stop() == 0
        rig.check_nothing_left()


def test_lapsed_while_it_drains_nothing_is_lost(rig: Rig) -> None:
    worker = rig.worker(STUB_STEP_S=0.01, drain=600.0)
    ids = rig.begun(6, more_than=3, max_tokens=3000)
    worker.process.send_signal(signal.SIGTERM)
    rig.until(lambda: any(lease["draining"] for lease in rig.leases()))
    rig.lapse(worker)
    assert worker.process.wait(PATIENCE_S) == 0
    rig.worker()
    rig.check(ids)


def test_a_cleared_server_is_served_again(rig: Rig) -> None:
    """FLUSHALL takes leases, books and scripts away; what comes afterwards is run."""
    worker = rig.worker(STUB_STEP_S=0.01)
    rig.begun(4, more_than=3, max_tokens=2000)
    rig.redis.flushall()
    rig.redis.script_flush()
    rig.until(lambda: worker.incarnations)
    late = rig.fill(10)
    rig.check(late)
    rig.until(lambda: rig.leases()[0]["running"] == 0)
    assert worker.stop() == 0
    rig.check_nothing_left()


def test_a_worker_serves_its_model_once_another_version_of_it_is_withdrawn(rig: Rig) -> None:
    """As on a shared store on which an `up` with another version came and went: else every call is a 404."""
    worker = rig.worker()
    own = json.loads(rig.redis.hget(keys.MODELS, "stub") or "")
    other = own | {"version": "other", "published": 1, "publisher": "up:elsewhere.7.ab", "withdrawn": 1}
    rig.redis.hset(keys.MODELS, "stub", json.dumps(other))

    def standing() -> dict[str, Any]:
        card: dict[str, Any] = json.loads(rig.redis.hget(keys.MODELS, "stub") or "")
        return card

    rig.until(lambda: "withdrawn" not in standing())
    assert (standing()["version"], "published" in standing()) == (own["version"], False)
    rig.check(rig.submit(1))
    assert worker.stop() == 0
