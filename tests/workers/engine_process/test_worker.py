"""A worker whose engine has a process of its own: whichever of the two dies, no token is lost or made twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Worker
from tests.stub_engine import DEADLY
from tests.waiting import PATIENCE_S, gone, suspend, until
from tests.workers.rig import Rig

HERE = "tests.workers.engine_process.engines"


def engine_of(worker: Worker) -> int:
    """The engine's process of a worker."""
    parent = worker.process.pid
    listed = until(lambda: [path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children")])
    (pid,) = [int(pid) for pids in listed for pid in pids.split()]
    return pid


def begin(rig: Rig, **fields: Any) -> Worker:
    return rig.worker(engine_process=True, **fields)


def deaths(rig: Rig, ids: list[str]) -> list[int]:
    return [int(rig.record(task_id).get("deaths", 0)) for task_id in ids]


def test_its_tasks_are_computed_cancelled_and_refused_as_in_the_worker(rig: Rig) -> None:
    worker = begin(rig, STUB_HOLD_AT=30)
    ids = rig.fill(6, max_tokens=20, n=2)
    (held,) = rig.begun(1, max_tokens=40)
    (long,) = rig.fill(1, prompt=[1] * 5000)
    rig.check(ids)
    assert rig.cancel(held)[0] == 1
    rig.until_settled([held, long])
    assert rig.status(held) == "cancelled"
    assert '"code":"context_length_exceeded"' in rig.record(long)["error"].replace('": "', '":"')
    engine = engine_of(worker)
    assert worker.stop() == 0
    assert until(lambda: gone(engine))
    rig.check_nothing_left()


def test_an_engine_that_is_killed_costs_nobody_a_token(rig: Rig) -> None:
    first = begin(rig, STUB_HOLD_AT=20)
    ids = rig.begun(6, more_than=5, max_tokens=60)
    os.kill(engine_of(first), signal.SIGKILL)
    assert first.process.wait(PATIENCE_S) == os.EX_SOFTWARE
    assert "was killed by SIGKILL" in first.log.read_text()
    assert not rig.leases()
    begin(rig)
    rig.check(ids)
    rig.check_nothing_left()


def test_an_engine_that_dies_in_a_step_costs_the_tasks_of_that_step_a_death_and_no_other(rig: Rig) -> None:
    first = begin(rig, engine_factory=f"{HERE}:halves", STUB_HOLD_AT=20)
    ids = rig.begun(6, more_than=5, max_tokens=60)
    (deadly,) = rig.fill(1, prompt=[DEADLY])
    assert first.process.wait(PATIENCE_S) == os.EX_SOFTWARE
    rig.cancel(deadly)
    begin(rig)
    rig.check(ids)
    assert deaths(rig, ids) == [1, 0, 1, 0, 1, 0]


def test_tasks_that_come_to_a_closed_engine_go_to_another_worker(rig: Rig) -> None:
    """It was lost while its worker was handing them over."""
    closed = rig.worker(engine_factory=f"{HERE}:closed", engine_process=False, retry_after=0.05)
    ids = rig.fill(3, max_tokens=4)
    rig.until(lambda: all(int(rig.record(task_id).get("claims", 0)) for task_id in ids))
    begin(rig)
    assert closed.stop() == 0
    rig.check(ids)
    assert deaths(rig, ids) == [0, 0, 0]


def test_an_engine_that_is_stopped_counts_as_dead_after_a_lease(rig: Rig) -> None:
    first = begin(rig, STUB_HOLD_AT=20, lease=1.0)
    ids = rig.begun(3, more_than=5, max_tokens=60)
    suspend(engine_of(first))
    assert first.process.wait(PATIENCE_S) == os.EX_SOFTWARE
    assert "has been stopped for" in first.log.read_text()
    begin(rig)
    rig.check(ids)


def test_no_engine_outlives_a_worker_that_is_killed(rig: Rig) -> None:
    first = begin(rig, STUB_HOLD_AT=20)
    ids = rig.begun(3, more_than=5, max_tokens=60)
    engine = engine_of(first)
    rig.kill(first)
    assert until(lambda: gone(engine))
    begin(rig)
    rig.check(ids)


def test_a_drained_worker_hands_back_what_its_engine_did_not_finish(rig: Rig) -> None:
    first = begin(rig, STUB_HOLD_AT=20, drain=0.5)
    ids = rig.begun(3, more_than=5, max_tokens=60)
    engine = engine_of(first)
    assert first.stop() == 0
    assert until(lambda: gone(engine))
    begin(rig)
    rig.check(ids)
    assert deaths(rig, ids) == [0, 0, 0]
    rig.check_nothing_left()


@pytest.mark.parametrize(
    ("factory", "says"), [("refused", "Refused: this model cannot be served"), ("dead", "ended with status 9")]
)
def test_an_engine_that_does_not_start_ends_its_worker(rig: Rig, factory: str, says: str) -> None:
    worker = rig.begin_worker(engine_process=True, engine_factory=f"{HERE}:{factory}")
    assert worker.process.wait(PATIENCE_S) == 1
    assert says in worker.log.read_text()
