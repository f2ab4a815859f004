"""What is stuck or broken is noticed, said, and costs nobody a token: not by waiting for a lease to lapse."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from producers import keys
from tests.processes import Worker, free_port
from tests.workers.rig import TIMES, Rig

STUCK = 777
#: A step that hangs is waited for, when all is handed back, for so long.
HANGS = TIMES | {"workers.drain:HAND_BACK_S": 4.0}


def given_up(worker: Worker) -> str:
    """It ends by itself, says why, and leaves no lease."""
    assert worker.process.wait(60) == os.EX_SOFTWARE
    return worker.log.read_text()


def begin(rig: Rig, **fields: Any) -> Worker:
    """With a `step_limit` it is quick to give itself up, on a busy machine also for nothing."""
    return rig.worker(**{"STUB_STEP_S": 0.01, "times": HANGS, **fields})


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"STUB_HANG_AFTER": 20}, "a step has not ended for"),
        # The step returns while all is handed back.
        ({"STUB_HANG_AFTER": 20, "STUB_HANG_S": 3.0}, "a step has not ended for"),
        ({"STUB_LOST_AFTER": 20}, "the device is lost: a fault of the stub's device"),
    ],
    ids=["hung", "hung for a while", "lost"],
)
def test_an_engine_that_is_gone_hands_its_tasks_over(rig: Rig, fault: dict[str, Any], says: str) -> None:
    ids = rig.fill(5, max_tokens=60, n=2)
    worker = begin(rig, step_limit=1.0, **{**fault, "STUB_STEP_S": 0.1})  # all have begun long before the 20th step
    rig.until(lambda: worker.process.poll() is not None)
    assert says in given_up(worker)
    assert rig.leases() == []
    made = {task_id: rig.tokens(task_id) for task_id in ids}
    assert all(0 < count < 120 for count in made.values())
    begin(rig)
    rig.until_settled(ids)
    rig.check(ids)
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"1"}, "any of them may have been to blame"
    assert {rig.record(task_id)["stuck"] for task_id in ids} == {"0"}, "but they had got on"
    rig.check_nothing_left()


@pytest.mark.slow
def test_a_task_that_hangs_every_worker_is_given_up_alone(rig: Rig) -> None:
    """Its neighbours are suspects once, until their next token."""
    (stuck,) = rig.fill(1, prompt=[STUCK])
    ids = rig.fill(4, max_tokens=100)
    workers = 0
    while not rig.settled([stuck]):
        worker = begin(rig, step_limit=2.0, STUB_HUNG_BY=STUCK)
        workers += 1
        rig.until(lambda worker=worker: worker.process.poll() is not None or rig.settled([stuck]))
        assert workers <= 4, rig.logs()
    assert workers == 4
    rig.check([stuck], "failed")
    assert "dead_lettered" in rig.record(stuck)["error"]
    rig.until_settled(ids)
    rig.check(ids)


def test_a_task_that_only_waits_is_no_suspect(rig: Rig) -> None:
    """Taken by this worker, and not yet in a step: released, as in a drain."""
    worker = begin(
        rig, step_limit=0.5, STUB_HANG_AFTER=5, STUB_STEP_S=0.2, WORKER_PLUGINS="tests.workers.plugins:claimer_waits"
    )
    (running,) = rig.fill(1, max_tokens=60)
    rig.until(lambda: rig.tokens(running) >= 3)
    (waiting,) = rig.fill(1, max_tokens=60)
    assert "1 tasks" in given_up(worker)
    assert rig.status(waiting) == "queued"
    begin(rig)
    rig.until_settled([running, waiting])
    rig.check([running, waiting])
    assert (rig.record(running)["deaths"], rig.record(waiting)["deaths"]) == ("1", "0")


def test_a_thread_that_dies_takes_no_lease_along(rig: Rig) -> None:
    worker = begin(rig, WORKER_PLUGINS="tests.workers.plugins:claimer_dies")
    ids = rig.fill(3)
    assert "penstock-claimer died: ZeroDivisionError" in given_up(worker)
    assert rig.leases() == []
    begin(rig)
    rig.until_settled(ids)
    rig.check(ids)


def test_an_event_loop_that_is_stuck_keeps_nothing_to_itself(rig: Rig, tmp_path: Path) -> None:
    worker = begin(rig, WORKER_PLUGINS="tests.workers.plugins:short_tempered")
    rig.sender().control.broadcast("stick", arguments={"go": str(tmp_path / "go")})
    rig.until(lambda: "stuck" in worker.log.read_text())
    (early,) = rig.fill(1)
    rig.until(lambda: any("event loop does not answer" in reason for reason in rig.leases()[0]["unready"]))
    # It was fetched for a loop that does not take it; now anybody may have it.
    rig.until(lambda: rig.redis.keys(keys.inflight("*")) == [])
    assert not rig.settled([early])
    (tmp_path / "go").touch()
    rig.until_settled([early])
    rig.check([early])
    rig.until(lambda: not rig.leases()[0]["unready"])
    assert "Well again: event loop" in worker.log.read_text()
    assert worker.stop() == 0


def test_a_worker_tells_whoever_runs_it_how_it_is(rig: Rig) -> None:
    port = free_port()
    loading = rig.begin_worker(health_port=port, engine_factory="tests.workers.plugins:loads_for_ever")
    rig.until(lambda: "loads for ever" in loading.log.read_text())
    assert ask(port, "/livez") == (200, {"status": "ok"})
    assert ask(port, "/readyz") == (503, {"status": "not ready", "reasons": ["the model is being loaded"]})
    assert loading.stop() == 0
    port = free_port()
    worker = begin(rig, health_port=port, drain=600.0)
    rig.until(lambda: ask(port, "/readyz") == (200, {"status": "ready"}))
    assert ask(port, "/elsewhere")[0] == 404
    (task_id,) = rig.fill(1, max_tokens=4000)
    rig.until(lambda: rig.tokens(task_id))
    worker.process.terminate()
    rig.until(lambda: ask(port, "/readyz") == (503, {"status": "not ready", "reasons": ["it drains"]}))
    assert ask(port, "/livez")[0] == 200
    assert worker.stop(signal.SIGINT) == 0


def test_a_port_that_is_taken_is_refused(rig: Rig) -> None:
    port = free_port()
    begin(rig, health_port=port)
    second = rig.begin_worker(health_port=port)
    assert second.process.wait(20) == 1
    assert f"port {port} for /readyz" in second.log.read_text()
