"""What is stuck or broken is noticed, said, and costs nobody a token: not by waiting for a lease to lapse."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.processes import Worker, free_port
from tests.stub_engine import SPOILED
from tests.waiting import PATIENCE_S
from tests.workers.rig import QUEUE, TIMES, Rig, two_servers
from workers.flow import intake

STUCK = 777
#: A step that hangs is waited for, when all is handed back, for so long.
HANGS = TIMES | {"workers.runtime.drain:HAND_BACK_S": 4.0}
#: A task is tried again soon.
AGAIN = {"workers.pool.app:RETRY_COUNTDOWN_S": 0.05, "workers.flow.intake:IDLE_S": 0.2}


def given_up(worker: Worker) -> str:
    """It ends by itself, says why, and leaves no lease."""
    assert worker.process.wait(PATIENCE_S) == os.EX_SOFTWARE
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
        pytest.param(
            {"STUB_HANG_AFTER": 20, "STUB_HANG_S": 3.0}, "a step has not ended for", marks=pytest.mark.exhaustive
        ),
        ({"STUB_LOST_AFTER": 20, "step_limit": 60.0}, "the device is lost: a fault of the stub's device"),
    ],
    ids=["hung", "hung for a while", "lost"],
)
def test_an_engine_that_is_gone_hands_its_tasks_over(rig: Rig, fault: dict[str, Any], says: str) -> None:
    ids = rig.fill(5, max_tokens=60, n=2)
    # All have begun long before the 20th step, and no other takes so long.
    worker = begin(rig, **{"step_limit": 2.0, **fault, "STUB_STEP_S": 0.05})
    rig.until(lambda: worker.process.poll() is not None)
    assert says in given_up(worker)
    assert rig.leases() == []
    made = {task_id: rig.tokens(task_id) for task_id in ids}
    assert all(0 < count < 120 for count in made.values())
    begin(rig)
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
        worker = begin(rig, step_limit=2.0, STUB_HUNG_BY=STUCK, max_deaths=2)
        workers += 1
        rig.until(lambda worker=worker: worker.process.poll() is not None or rig.settled([stuck]))
        assert workers <= 3, rig.logs()
    assert workers == 3
    rig.check([stuck], "failed")
    assert "dead_lettered" in rig.record(stuck)["error"]
    rig.check(ids)


def test_a_worker_whose_device_another_model_keeps_fetches_nothing_meanwhile(rig: Rig, tmp_path: Path) -> None:
    neighbour = tmp_path / "computes"
    neighbour.touch()
    begin(rig, STUB_NEIGHBOUR=str(neighbour))
    rig.until(
        lambda: [lease["unready"] for lease in rig.leases()] == [["another model has computed on its device for 100 s"]]
    )
    ids = rig.fill(3)
    (lease,) = rig.store.keys(keys.lease("*"))
    renewed = rig.store.pexpiretime(lease)
    rig.until(lambda: rig.store.pexpiretime(lease) > renewed)
    assert {rig.status(task_id) for task_id in ids} == {"queued"}
    neighbour.unlink()
    rig.until(lambda: [lease["unready"] for lease in rig.leases()] == [[]])
    rig.until_settled(ids)
    assert {rig.status(task_id) for task_id in ids} == {"completed"}


def left_whole(rig: Rig, ids: list[str]) -> None:
    """Handed back with its tokens: another worker ends it, and none of them has cost it anything."""
    assert rig.leases() == []
    assert {rig.status(task_id) for task_id in ids} == {"queued"}
    assert rig.waiting(QUEUE) == len(ids), "they wait where whoever looks at the queue sees them"
    assert all(0 < rig.tokens(task_id) < 120 for task_id in ids)
    begin(rig)
    rig.check(ids)
    assert {rig.record(task_id).get("deaths", "0") for task_id in ids} == {"0"}
    rig.check_nothing_left()


def test_a_model_that_breaks_costs_no_task_anything(rig: Rig) -> None:
    ids = rig.fill(5, max_tokens=60, n=2)
    worker = begin(rig, STUB_NAN_AFTER=20, STUB_STEP_S=0.1)
    said = given_up(worker)
    assert "the model is broken, not a request" in said
    assert "start it again" in said
    assert "retry" not in said.lower(), "no task is tried again for what is not its fault"
    left_whole(rig, ids)


def test_requests_that_give_nan_break_no_model(rig: Rig) -> None:
    """However many, and however often they are tried again: the model answers between them."""
    worker = begin(rig, times=TIMES | AGAIN)
    spoiled = rig.fill(6, prompt=[SPOILED], n=2)
    ids = rig.fill(4, max_tokens=60)
    rig.check(ids)
    rig.check(spoiled, "failed")
    assert all("not finite" in rig.record(task_id)["error"] for task_id in spoiled)
    assert not rig.leases()[0]["unready"]
    assert worker.stop() == 0
    rig.check_nothing_left()


def test_a_model_that_is_broken_from_the_start_is_never_announced(rig: Rig) -> None:
    ids = rig.fill(2)
    worker = rig.begin_worker(STUB_NAN_AFTER=0)
    assert worker.process.wait(PATIENCE_S) != 0
    assert "cannot serve stub: after '1 + 1 =', the model's logits are not finite" in worker.log.read_text()
    assert (rig.redis.exists(keys.MODELS, keys.POOLS), rig.leases()) == (0, [])
    assert rig.waiting(QUEUE) == len(ids)


def test_memory_that_cannot_be_corrected_is_no_tasks_fault(rig: Rig, tmp_path: Path) -> None:
    told = tmp_path / "ecc"
    told.write_text("7")  # of an earlier process
    worker = begin(rig, ECC_ERRORS=told, STUB_HOLD_AT=60, WORKER_PLUGINS="tests.workers.plugins:gpu_of_a_file")
    ids = rig.begun(3, more_than=5, max_tokens=120)
    rig.until(lambda: all("gpu" in lease for lease in rig.leases()))  # it has read the 7
    told.write_text("8")
    assert "memory has 1 new errors that it could not correct" in given_up(worker)
    left_whole(rig, ids)


def test_a_worker_that_cannot_publish_fetches_nothing_until_it_can(tmp_path: Path) -> None:
    port, go = free_port(), tmp_path / "go"
    with two_servers() as rig:
        rig.publish_card()
        running, late = rig.submit(2, max_tokens=100)
        message = rig.redis.lpop(QUEUE)
        held = {"STUB_HOLD_AT": 5, "STUB_GO": go}
        worker = begin(rig, health_port=port, WORKER_PLUGINS="tests.workers.plugins:short_tempered", **held)
        rig.until(lambda: rig.tokens(running))
        rig.store.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
        go.touch()
        rig.until(lambda: any("to be published" in reason for reason in ask(port, "/readyz")[1].get("reasons", [])))
        rig.redis.lpush(QUEUE, message)
        time.sleep(1.5 * intake.IDLE_S)  # it would have looked
        assert rig.waiting(QUEUE) == 1
        rig.store.client_unpause()
        rig.check([running, late])
        assert "Well again: publisher" in worker.log.read_text()
        assert worker.stop() == 0


def test_a_task_that_only_waits_is_no_suspect(rig: Rig) -> None:
    """Taken by this worker, and not yet in a step: released, as in a drain."""
    worker = begin(
        rig, step_limit=2.0, STUB_HANG_AFTER=5, STUB_STEP_S=0.05, WORKER_PLUGINS="tests.workers.plugins:claimer_waits"
    )
    (running,) = rig.fill(1, max_tokens=60)
    rig.until(lambda: rig.tokens(running) >= 3)
    (waiting,) = rig.fill(1, max_tokens=60)
    assert "1 tasks" in given_up(worker)
    assert rig.status(waiting) == "queued"
    begin(rig)
    rig.check([running, waiting])
    assert (rig.record(running)["deaths"], rig.record(waiting)["deaths"]) == ("1", "0")


def test_a_thread_that_dies_takes_no_lease_along(rig: Rig) -> None:
    worker = begin(rig, WORKER_PLUGINS="tests.workers.plugins:claimer_dies")
    ids = rig.fill(3)
    assert "penstock-claimer died: ZeroDivisionError" in given_up(worker)
    assert rig.leases() == []
    begin(rig)
    rig.check(ids)


def test_an_event_loop_that_is_stuck_keeps_nothing_to_itself(rig: Rig, tmp_path: Path) -> None:
    held = {"STUB_HOLD_AT": 5, "STUB_GO": tmp_path / "stuck"}
    worker = begin(rig, WORKER_PLUGINS="tests.workers.plugins:short_tempered", **held)
    (native,) = rig.begun(1)
    rig.sender().control.broadcast("stick", arguments={"go": str(tmp_path / "go")})
    rig.until(lambda: "stuck" in worker.log.read_text())
    (tmp_path / "stuck").touch()
    rig.check([native])  # it passes the loop by
    early = rig.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 16, "seed": 0}).id
    rig.until(lambda: any("event loop does not answer" in reason for reason in rig.leases()[0]["unready"]))
    # If it was fetched in time, for a loop that does not take it, anybody may have it now.
    rig.until(lambda: rig.redis.keys(broker_keys.inflight("*")) == [])
    assert not rig.settled([early])
    (tmp_path / "go").touch()
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
    rig.until(lambda: ask(port, "/readyz")[1].items() >= {"status": "ready"}.items())
    rig.until(
        lambda: ask(port, "/readyz")[1].get("cold_start", {}).keys() >= {"weights", "warm_up", "connect", "total"}
    )
    assert ask(port, "/readyz")[0] == 200
    assert ask(port, "/elsewhere")[0] == 404
    rig.begun(1, max_tokens=4000)
    worker.process.terminate()
    rig.until(lambda: ask(port, "/readyz")[1].get("reasons") == ["it drains"])
    assert ask(port, "/readyz")[0] == 503
    assert ask(port, "/livez")[0] == 200
    assert worker.stop(signal.SIGINT) == 0


def test_a_worker_whose_lease_nobody_renews_is_not_ready_and_says_why(rig: Rig) -> None:
    """The store answers and refuses, so that nothing tells it that the lease is gone."""
    port = free_port()
    begin(rig, health_port=port, lease=1.0)
    rig.redis.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
    refused = re.compile(r"its lease was not renewed for \d+ s: .*'evalsha'")
    rig.until(lambda: any(map(refused.match, ask(port, "/readyz")[1].get("reasons", []))))
    rig.redis.execute_command("ACL", "SETUSER", "default", "+@all")
    rig.until(lambda: ask(port, "/readyz")[0] == 200)


def test_a_port_that_is_taken_is_refused(rig: Rig) -> None:
    port = free_port()
    begin(rig, health_port=port)
    second = rig.begin_worker(health_port=port)
    assert second.process.wait(PATIENCE_S) == 1
    assert f"port {port} for /readyz" in second.log.read_text()
