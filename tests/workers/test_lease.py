"""A worker whose lease lapsed is dead to the others: it drops all it held and begins a new life, under a new name."""

from __future__ import annotations

import signal

from producers import keys
from tests.processes import Worker
from tests.workers.rig import LEASE, Rig, rig, two_servers


def test_stopped_for_longer_than_its_lease(rig: Rig) -> None:
    """Meanwhile another has its tasks; woken, it appends nothing to their streams, and goes on under a new name.

    Whoever takes a task from a worker that does not answer must count it dead: it cannot know better.
    """
    first = rig.worker(STUB_STEP_S=0.01)
    ids = rig.fill(8, max_tokens=150)
    rig.until(lambda: all(rig.tokens(task_id) > 5 for task_id in ids))
    (old,) = first.incarnations
    first.process.send_signal(signal.SIGSTOP)
    second = rig.worker(STUB_STEP_S=0.01)
    rig.until(lambda: {rig.record(task_id).get("owner") for task_id in ids} == set(second.incarnations))
    first.process.send_signal(signal.SIGCONT)
    rig.until(lambda: first.incarnations and old not in first.incarnations)
    rig.until_settled(ids)
    rig.check(ids)
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"1"}
    late = rig.fill(200)
    rig.until_settled(late)
    rig.check(late)
    assert first.stop() == second.stop() == 0
    rig.check_nothing_left()


def test_a_server_that_stood_still_killed_nobody() -> None:
    """All leases lapse, and everybody lives: each says so before anybody takes a task up, so no death is counted."""
    with rig(**{"enable-debug-command": "local"}) as made:
        _sleeps_and_goes_on(made)


def _sleeps_and_goes_on(rig: Rig) -> None:
    first = rig.worker(STUB_STEP_S=0.01, STUB_SEQS=8, max_deaths=1)
    ids = rig.fill(16, max_tokens=200)
    waiting = rig.fill(4, max_tokens=200)
    second = rig.begin_worker(STUB_STEP_S=0.01, STUB_SEQS=8, max_deaths=1)
    _sleep(rig, first)
    rig.until(lambda: second.incarnations)
    for _ in range(2):
        rig.until(lambda: all(rig.tokens(task_id) > 5 for task_id in ids))
        _sleep(rig, first, second)
    rig.until_settled(ids + waiting)
    rig.check(ids + waiting)
    assert {rig.record(task_id)["deaths"] for task_id in ids + waiting} == {"0"}
    assert first.stop() == second.stop() == 0
    rig.check_nothing_left()


def _sleep(rig: Rig, *workers: Worker) -> None:
    """The server answers nobody for longer than a lease; until all workers have begun anew."""
    old = [worker.incarnations for worker in workers]
    rig.redis.execute_command("DEBUG", "SLEEP", 1.5 * LEASE)
    rig.until(lambda: all(w.incarnations and w.incarnations != before for w, before in zip(workers, old, strict=True)))


def test_the_leases_may_lapse_apart() -> None:
    """One on the broker, one on the store: either gone, the life is over and the other lease is given up."""
    with two_servers() as rig:
        worker = rig.worker(STUB_STEP_S=0.01, lease=4.0)
        for server in (rig.redis, rig.store):
            ids = rig.submit(6, max_tokens=100)
            rig.until(lambda ids=ids: all(rig.tokens(task_id) > 3 for task_id in ids))
            (old,) = worker.incarnations
            server.delete(keys.lease(old))
            rig.until(lambda old=old: worker.incarnations and old not in worker.incarnations)
            assert not rig.redis.exists(keys.lease(old))
            rig.until_settled(ids)
            rig.check(ids)
        assert worker.stop() == 0
        rig.check_nothing_left()


def test_lapsed_while_it_drains_nothing_is_lost(rig: Rig) -> None:
    worker = rig.worker(STUB_STEP_S=0.01, drain=20.0)
    ids = rig.fill(6, max_tokens=3000)
    rig.until(lambda: all(rig.tokens(task_id) > 3 for task_id in ids))
    worker.process.send_signal(signal.SIGTERM)
    rig.until(lambda: any(lease["draining"] for lease in rig.leases()))
    rig.redis.delete(keys.lease(worker.incarnations[0]))
    assert worker.process.wait(30) == 0
    rig.worker()
    rig.until_settled(ids)
    rig.check(ids)


def test_a_cleared_server_is_served_again(rig: Rig) -> None:
    """FLUSHALL takes leases, books and scripts away; what comes afterwards is run."""
    worker = rig.worker(STUB_STEP_S=0.01)
    ids = rig.fill(4, max_tokens=2000)
    rig.until(lambda: all(rig.tokens(task_id) > 3 for task_id in ids))
    rig.redis.flushall()
    rig.redis.script_flush()
    rig.until(lambda: worker.incarnations)
    late = rig.fill(10)
    rig.until_settled(late)
    rig.check(late)
    rig.until(lambda: rig.leases()[0]["running"] == 0)
    assert worker.stop() == 0
    rig.check_nothing_left()
