"""SIGTERM lets end what ends in time and hands the rest back with its tokens; SIGQUIT hands everything back at once."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.contract.record import Record
from tests.exhaustive import few
from tests.stub_engine import STALLED
from tests.waiting import PATIENCE_S, suspend
from tests.workers.rig import QUEUE, TIMES, Rig, two_servers
from workers.runtime.signals import SAME_S

ORDINARY = "tests.workers.plugins:ordinary_tasks"
#: Where handing back takes all of its time, because something hangs.
HANGS = TIMES | {"workers.runtime.drain:HAND_BACK_S": 5.0}


def check_gone(rig: Rig) -> None:
    """Nothing in flight, no lease, no name in the books: nobody has to wait for anything to lapse."""
    assert rig.redis.keys(broker_keys.inflight("*")) == []
    assert rig.redis.keys(keys.lease("*")) == rig.store.keys(keys.lease("*")) == []
    assert rig.redis.hgetall(broker_keys.INCARNATIONS) == {}


@pytest.mark.parametrize("how", few([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_what_ends_in_time_ends_here(rig: Rig, how: signal.Signals) -> None:
    worker = rig.worker(STUB_STEP_S=0.02, drain=30.0)
    ids = rig.begun(4, max_tokens=50)
    assert worker.stop(how) == 0
    rig.check(ids)
    check_gone(rig)
    rig.check_nothing_left()


def test_the_rest_goes_back_with_its_tokens(rig: Rig) -> None:
    worker = rig.worker(STUB_STEP_S=0.02, STUB_SEQS=6, STUB_HOLD_AT=50, drain=600.0)
    short, long, waiting = rig.fill(3, max_tokens=10), rig.fill(3, max_tokens=100, n=2), rig.fill(2, max_tokens=10)
    rig.until(lambda: all(rig.tokens(task_id) > 3 for task_id in (*short, *long[:1])))
    worker.process.terminate()
    rig.until_settled(short)
    assert worker.stop(signal.SIGQUIT) == 0
    rig.check(short)
    check_gone(rig)
    for task_id in long:
        record = rig.record(task_id)
        assert record["status"] == "queued"
        assert record["deaths"] == "0"
        assert not record.keys() & {"claim", "owner"}
    made = {task_id: rig.tokens(task_id) for task_id in long}
    assert made[long[0]] > 3
    rig.worker(STUB_STEP_S=0.002)
    rig.check([*long, *waiting])
    assert rig.record(long[0])["claims"] == "2"
    first, second = Record.parse(long[0], rig.record(long[0])).runs.values()
    assert [run.owner.split(".")[0] for run in (first, second)] == [worker.name, rig.workers[1].name]
    assert all(run.step is not None and run.last is not None and run.began <= run.last for run in (first, second))
    rig.until(lambda: rig.redis.keys(broker_keys.inflight("*")) == [])
    rig.check_nothing_left()


def test_sigquit_hands_back_at_once_and_keeps_the_order(rig: Rig) -> None:
    worker = rig.worker(STUB_HOLD_AT=30, STUB_SEQS=5, drain=600.0)
    ids = rig.fill(8, max_tokens=60)
    rig.until(lambda: rig.tokens(ids[4]))
    assert worker.stop(signal.SIGQUIT) == 0
    check_gone(rig)
    waiting = [json.loads(raw)["headers"]["id"] for raw in rig.redis.lrange(QUEUE, 0, -1)]
    assert waiting == ids[::-1], "those that ran are in front, the oldest first"
    rig.worker()
    rig.check(ids)


@pytest.mark.parametrize("second", few([signal.SIGTERM, signal.SIGQUIT], signal.SIGTERM))
def test_a_second_signal_cuts_the_drain_short(rig: Rig, second: signal.Signals) -> None:
    worker = rig.worker(STUB_STEP_S=0.02, drain=600.0)
    (task_id,) = rig.fill(1, prompt=[STALLED])
    rig.until(lambda: rig.status(task_id) == "in_progress")
    worker.process.send_signal(signal.SIGTERM)
    rig.until(lambda: any(lease["draining"] for lease in rig.leases()))
    if second is signal.SIGTERM:
        time.sleep(SAME_S)  # else it is the same one
    assert worker.stop(second) == 0
    assert rig.status(task_id) == "queued"
    assert [one["why"] for one in json.loads(rig.record(task_id)["given_back"])] == ["drained"]
    check_gone(rig)


def test_a_third_ends_it_on_the_spot(rig: Rig) -> None:
    """With a store that does not answer, so that handing back is still under way."""
    worker = rig.worker(STUB_STEP_S=0.02, drain=600.0)
    rig.begun(1, max_tokens=2000)
    server = rig.redis.info("server")["process_id"]
    suspend(server)
    try:
        for sig, heard in ((signal.SIGTERM, "SIGTERM came"), (signal.SIGINT, "SIGINT came")):
            worker.process.send_signal(sig)
            rig.until(lambda heard=heard: heard in worker.log.read_text())
        worker.process.terminate()
        assert worker.process.wait(PATIENCE_S) == os.EX_SOFTWARE
    finally:
        os.kill(server, signal.SIGCONT)
    assert "the third signal" in worker.log.read_text()


def test_an_event_loop_that_is_stuck_does_not_hold_it_up(rig: Rig) -> None:
    """It waits for a server that does not answer, say. Deliveries, and the drain, are no concern of its."""
    times = TIMES | {"workers.runtime.drain:HAND_BACK_S": 8.0, "workers.runtime.drain:EXIT_S": 10.0}
    sticks = "tests.workers.plugins:event_loop_sticks"
    worker = rig.worker(times=times, STUB_STEP_S=0.02, drain=0.3, WORKER_PLUGINS=sticks)
    ids = rig.begun(3, more_than=3, max_tokens=2000)
    rig.sender().control.broadcast("stick")
    rig.until(lambda: "stuck" in worker.log.read_text())
    assert worker.stop() == 0
    assert {rig.status(task_id) for task_id in ids} == {"queued"}
    check_gone(rig)


def test_while_the_model_is_loaded_it_just_ends(rig: Rig) -> None:
    worker = rig.begin_worker(engine_factory="tests.workers.plugins:loads_for_ever")
    rig.until(lambda: "loads for ever" in worker.log.read_text())
    assert worker.stop() == 0
    check_gone(rig)


def test_told_to_end_as_it_takes_its_first_lease_it_leaves_none(rig: Rig) -> None:
    """Before any of its threads runs."""
    worker = rig.begin_worker(WORKER_PLUGINS="tests.workers.plugins:is_told_to_end_at_its_first_lease")
    assert worker.process.wait(PATIENCE_S) == 0
    check_gone(rig)


def test_a_step_that_does_not_end_does_not_hold_it_up(rig: Rig) -> None:
    """As while a GPU's kernels are compiled: what was published stands, the step's outcome is nobody's."""
    worker = rig.worker(times=HANGS, STUB_STEP_S=0.01, STUB_HANG_AFTER=20, drain=0.2)
    ids = rig.fill(3, max_tokens=200)
    rig.until(lambda: all(rig.status(task_id) == "in_progress" for task_id in ids))
    rig.until(lambda: rig.leases()[0]["steps"] == 20)
    assert worker.stop() == 0
    assert {rig.status(task_id) for task_id in ids} == {"queued"}
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"0"}
    check_gone(rig)


@pytest.mark.parametrize("noticed", [False, True])
def test_with_its_lease_lapsed_it_ends_cleanly(rig: Rig, noticed: bool) -> None:
    worker = rig.worker(STUB_STEP_S=0.02, drain=600.0)
    ids = rig.begun(3, more_than=3, max_tokens=2000)
    rig.lapse(worker)
    if noticed:
        rig.until(lambda: "beginning anew" in worker.log.read_text())
    assert worker.stop(signal.SIGQUIT) == 0
    assert {rig.status(task_id) for task_id in ids} == {"queued"}
    assert {rig.record(task_id)["deaths"] for task_id in ids} == {"0"}
    check_gone(rig)


def test_nothing_is_fetched_while_it_drains(rig: Rig) -> None:
    worker = rig.worker(STUB_STEP_S=0.02, drain=600.0)
    (running,) = rig.begun(1, max_tokens=4000)
    worker.process.send_signal(signal.SIGTERM)
    rig.until(lambda: any(lease["draining"] for lease in rig.leases()))
    (late,) = rig.fill(1)
    made = rig.tokens(running)
    rig.until(lambda: rig.tokens(running) > made + 30)
    rig.cancel(running)
    assert worker.process.wait(PATIENCE_S) == 0
    rig.check([running], "cancelled")
    assert rig.status(late) == "queued"
    assert "claims" not in rig.record(late)


def test_a_task_that_waits_for_its_countdown_does_not_hold_the_drain(rig: Rig) -> None:
    worker = rig.worker(drain=600.0)
    app = rig.sender()
    result = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": 3}, countdown=3600)
    rig.until(lambda: not rig.waiting(keys.model_queue("stub")))
    assert worker.stop() == 0
    check_gone(rig)
    assert rig.redis.zcard(broker_keys.delayed(QUEUE)) == 1, "it is still to be run"
    assert result.state == "PENDING"


@pytest.mark.parametrize(("pause", "drain", "ends"), [(1.0, 30.0, True), (600.0, 0.2, False)])
def test_an_ordinary_task_ends_in_time_too_or_is_handed_back(rig: Rig, pause: float, drain: float, ends: bool) -> None:
    worker = rig.worker(drain=drain, WORKER_PLUGINS=ORDINARY)
    result = rig.sender().send_task("app.note", ("note", pause))
    rig.until(lambda: rig.redis.llen("seen:note"))
    assert worker.stop() == 0
    assert rig.redis.lrange("seen:note", 0, -1) == ["begun", "done"][: 1 + ends]
    assert (result.state == "SUCCESS", rig.waiting(keys.model_queue("stub"))) == (ends, int(not ends))
    check_gone(rig)
    if ends:
        rig.check_nothing_left()


@pytest.mark.slow
def test_with_a_store_that_hangs_it_ends_in_time_and_nothing_is_lost() -> None:
    """What cannot be released is not given up either: it returns, and whoever claims it next finds its owner dead."""
    with two_servers() as rig:
        worker = rig.worker(times=HANGS | {"workers.runtime.drain:EXIT_S": 10.0}, STUB_HOLD_AT=50, drain=0.3)
        ids = rig.submit(4, max_tokens=100)
        rig.until(lambda: all(rig.tokens(task_id) > 3 for task_id in ids))
        server = rig.store.info("server")["process_id"]
        suspend(server)
        try:
            assert worker.stop() == 1
        finally:
            os.kill(server, signal.SIGCONT)
        rig.lapse(worker)
        rig.worker()
        rig.check(ids)
