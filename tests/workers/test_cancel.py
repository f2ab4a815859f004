"""A cancel accepted before FINISH wins, wherever the task is; deadlines end a task likewise."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest

from producers import Client, Handle
from producers.connection.script import run_many
from producers.contract import keys
from producers.store.protocol import delete
from tests.chaos import clock
from tests.stub_engine import STALLED
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig


def test_before_any_worker_is_up(rig: Rig) -> None:
    ids = rig.fill(3)
    assert rig.cancel(ids[0]) == [1, "cancelled"]
    assert rig.entries(ids[0])[-1]["end"] == "cancelled"
    rig.worker()
    rig.until_settled(ids)
    rig.check(ids[:1], "cancelled")
    rig.check(ids[1:])
    rig.until(lambda: not rig.leases()[0]["tasks"])
    rig.check_nothing_left()


def test_while_it_is_queued_behind_others(rig: Rig, tmp_path: Path) -> None:
    rig.worker(STUB_SEQS=1, STUB_STEP_S=0.01, STUB_HOLD_AT=5, STUB_GO=tmp_path / "go")
    running, waiting = rig.fill(2, max_tokens=20)
    rig.until(lambda: rig.tokens(running))
    assert rig.cancel(waiting) == [1, "cancelled"]
    (tmp_path / "go").touch()
    rig.check([running])
    rig.check([waiting], "cancelled")
    assert rig.tokens(waiting) == 1


def test_while_it_runs(rig: Rig) -> None:
    rig.worker(STUB_STEP_S=0.02)
    (other,) = rig.fill(1, max_tokens=200)
    (cancelled,) = rig.begun(1, more_than=2, max_tokens=4000)
    assert rig.cancel(cancelled) == [1, "in_progress"]
    at = rig.tokens(cancelled)
    rig.check([cancelled], "cancelled")
    assert rig.tokens(cancelled) <= at + 2, "a step at most, and the terminal entry"
    rig.check([other])
    rig.until(lambda: rig.leases()[0]["running"] == 0)


def test_while_it_runs_and_makes_no_token(rig: Rig) -> None:
    """The word reaches the worker by itself, not only with the answer to the next APPEND."""
    rig.worker(STUB_STEP_S=0.02)
    (task_id,) = rig.fill(1, prompt=[STALLED])
    rig.until(lambda: rig.status(task_id) == "in_progress")
    rig.until(lambda: rig.redis.pubsub_numsub(keys.control(rig.record(task_id)["owner"]))[0][1] == 1)
    assert rig.cancel(task_id) == [1, "in_progress"]
    rig.check([task_id], "cancelled")
    assert rig.tokens(task_id) == 1


def test_between_its_claim_and_its_start(rig: Rig) -> None:
    """The word comes for what does not run yet; it makes no token that would tell of it."""
    rig.worker(WORKER_PLUGINS="tests.workers.plugins:starts_when_told", SEEN_URL=rig.url)
    (task_id,) = rig.fill(1, prompt=[STALLED])
    rig.until(lambda: rig.status(task_id) == "in_progress")
    rig.until(lambda: rig.redis.pubsub_numsub(keys.control(rig.record(task_id)["owner"]))[0][1] == 1)
    assert rig.cancel(task_id) == [1, "in_progress"]
    rig.until(lambda: rig.redis.llen("heard"))
    rig.redis.set("go", 1)
    rig.check([task_id], "cancelled")


def test_after_the_end_it_is_not_accepted(rig: Rig) -> None:
    rig.worker()
    (task_id,) = rig.fill(1)
    rig.until_settled([task_id])
    assert rig.cancel(task_id) == [0, "completed"]
    rig.check([task_id])
    assert rig.cancel("nobody") == [0, "gone"]


def test_deleted_before_it_is_settled(rig: Rig) -> None:
    """Nothing is left of it, nor the result that a plain one's worker has stored since; the others go on. A plain one
    whose record a failover has lost is made again."""
    worker = rig.worker(WORKER_PLUGINS="tests.workers.plugins:settles_when_told", SEEN_URL=rig.url)
    app, kwargs = rig.sender(), {"prompt": [1], "max_tokens": 4, "seed": 0}
    lost, plain = (app.send_task(keys.TASK_NAME, kwargs=kwargs) for _ in range(2))
    assert lost.get(timeout=PATIENCE_S)
    assert plain.get(timeout=PATIENCE_S)
    (deleted,) = rig.fill(1)
    rig.until(lambda: rig.status(deleted) == "completed")
    rig.store.delete(keys.task(lost.id), keys.stream(lost.id))
    run_many(rig.store, [delete(deleted, "x"), delete(plain.id, "x")])
    assert not rig.store.exists(keys.celery_result(plain.id))
    rig.store.set(keys.celery_result(plain.id), "stored by its worker, which was about to")
    rig.redis.set("go", 1)
    rig.check([lost.id])
    rig.check_nothing_left()
    assert not rig.status(deleted)
    assert not rig.status(plain.id)
    assert not rig.store.exists(keys.celery_result(plain.id))
    assert f"goes back: {lost.id}" in worker.log.read_text()
    for task_id in (deleted, plain.id):
        assert f"goes back: {task_id}" not in worker.log.read_text()


def test_a_plain_task_that_is_deleted_while_it_runs_is_not_made_again(rig: Rig) -> None:
    """Its worker drops it and goes on; a copy of its message, which holds the prompt, is dropped, too."""
    rig.worker(STUB_STEP_S=0.01)
    app = rig.sender()
    sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4000, "seed": 0})
    other = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 100, "seed": 0})
    rig.until(lambda: rig.tokens(sent.id) > 3 and rig.tokens(other.id) > 3)
    run_many(rig.store, [delete(sent.id, "x")])
    app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4000, "seed": 0}, task_id=sent.id)
    rig.check([other.id])
    rig.check_nothing_left()
    left = [name for name in rig.store.keys("*") if sent.id in name]
    assert left == [keys.erased(sent.id)]


def test_at_every_moment_the_answer_is_kept(rig: Rig) -> None:
    """Cancels that race with the end: accepted means cancelled, not accepted means completed."""
    rig.worker(STUB_STEP_S=0.001)
    ids = rig.fill(120, max_tokens=12)
    accepted = {}
    for task_id in itertools.islice(ids, 0, None, 2):
        accepted[task_id] = rig.cancel(task_id)[0]
    rig.until_settled(ids)
    for task_id in ids:
        rig.check([task_id], "cancelled" if accepted.get(task_id) else "completed")


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_deadline_ends_a_task(rig: Rig, state: str) -> None:
    if state == "running":
        rig.worker(STUB_STEP_S=0.02)
    client = Client(rig.url)
    ids = rig.fill(1)
    rig.publish_card()
    if state == "queued":
        handle = client.submit(model="stub", prompt=[1, 2], max_tokens=4000, timeout=1.0, seed=0)
        deadline = int(rig.record(handle.id)["deadline"])
        rig.until(lambda: _server_ms(rig) > deadline)
        rig.worker()
    else:
        handle = _running(rig, client, 2)
    rig.until_settled([handle.id, *ids])
    rig.check([handle.id], "failed" if state == "queued" else "incomplete")
    result = handle.result(60, raise_for_status=False)
    assert result.error
    assert result.error["code"] == "expired"
    if state == "queued":
        assert rig.tokens(handle.id) == 1
    else:
        assert result.choices[0].finish_reason == "deadline"
        assert len(result.token_ids) == result.usage["output_tokens"] == rig.tokens(handle.id) - 1
    rig.check(ids)
    rig.until(lambda: rig.leases()[0]["running"] == 0)
    rig.check_nothing_left()
    client.close()


@pytest.mark.skipif(not clock.available(), reason="clocks can be set on Linux, with a C compiler")
def test_a_worker_whose_clock_was_set_ends_nothing_before_its_deadline(rig: Rig, tmp_path: Path) -> None:
    its = clock.Clock(tmp_path / "clock")
    rig.worker(**its.env)
    rig.publish_card()
    its.set(3600)
    with Client(rig.url) as client:
        handle = client.submit(model="stub", prompt=[1, 2], max_tokens=4, timeout=600, seed=0)
        assert handle.result(PATIENCE_S).status == "completed"


def test_what_has_ended_by_the_deadline_keeps_its_reason(rig: Rig) -> None:
    """One choice ends by itself, before the other fails to."""
    rig.worker(STUB_STEP_S=0.02, STUB_SHORT_CHOICE=5)
    with Client(rig.url) as client:
        result = _running(rig, client, 12, n=2).result(PATIENCE_S)
    assert result.status == "incomplete"
    assert [choice.finish_reason for choice in result.choices] == ["stop", "deadline"]
    assert len(result.choices[0].token_ids) == 5
    assert len(result.choices[1].token_ids) > 5


def test_deadlines_that_race_with_ends_and_cancels(rig: Rig) -> None:
    """Cancelled where that was accepted, completed only with all of it, incomplete otherwise."""
    rig.worker(STUB_STEP_S=0.001)
    with Client(rig.url) as client:
        task = {"model": "stub", "prompt": [1, 2, 3, 4], "max_tokens": 40}
        handles = [client.submit(seed=k, timeout=0.1 + 0.002 * k, **task) for k in range(60)]
        accepted = {handle.id: handle.cancel() for handle in handles[::5]}
        rig.until_settled([handle.id for handle in handles])
        results = {handle.id: handle.result(60, raise_for_status=False) for handle in handles}
    for task_id, result in results.items():
        ended = (len(result.token_ids), result.choices[0].finish_reason)
        if accepted.get(task_id):
            assert result.status == "cancelled"
        elif result.status == "completed":
            assert ended == (40, "length")
        else:
            began = rig.record(task_id).get("started") is not None
            assert result.status == ("incomplete" if began else "failed")
            assert ended[0] < 40
            assert ended[1] == ("deadline" if began else None)


@pytest.mark.parametrize("left", ["its worker died", "it was given back"])
def test_what_an_earlier_worker_made_of_it_stands(rig: Rig, left: str) -> None:
    """Nobody has it when its deadline passes."""
    worker = rig.worker(STUB_STEP_S=0.02)
    with Client(rig.url) as client:
        handle = _running(rig, client, 2)
        if left == "its worker died":
            rig.kill(worker)
        else:
            worker.stop(signal.SIGQUIT)
        deadline = int(rig.record(handle.id)["deadline"])
        rig.until(lambda: _server_ms(rig) > deadline)
        rig.worker()
        result = handle.result(PATIENCE_S)
        rig.until_settled([handle.id])
    assert (result.status, result.choices[0].finish_reason) == ("incomplete", "deadline")
    assert len(result.token_ids) > 2
    rig.check([handle.id], "incomplete")


def _running(rig: Rig, client: Client, more_than: int, **task: Any) -> Handle:
    """A task with a deadline that makes more than so many tokens before it. A machine that is busy needs longer."""
    for timeout in (1.0, 4.0, 16.0, 64.0):
        handle = client.submit(model="stub", prompt=[1, 2], max_tokens=4000, timeout=timeout, seed=0, **task)
        made: list[int] = []
        rig.until(lambda: made.append(rig.tokens(handle.id)) or made[-1] > more_than or rig.settled([handle.id]))  # noqa: B023
        if made[-1] > more_than:
            return handle
    raise AssertionError(rig.logs())


def _server_ms(rig: Rig) -> int:
    seconds, micros = rig.store.time()
    return int(seconds * 1000 + micros // 1000)
