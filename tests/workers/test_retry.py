"""An engine's fault is answered by Celery's retry: a copy is published, which goes on where the stream ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from producers.contract import keys
from tests.waiting import PATIENCE_S
from tests.workers.rig import TIMES, Rig

#: Between two tries there is time enough for a test to do something.
LATE = TIMES | {"workers.pool.app:RETRY_COUNTDOWN_S": 8.0}


def test_a_plain_task_is_retried_and_its_stream_goes_on(rig: Rig) -> None:
    rig.worker(STUB_FAULTS=1)
    app = rig.sender()
    result = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": 3, "max_tokens": 20})
    assert result.get(timeout=PATIENCE_S)["choices"][0]["finish_reason"] == "length"
    assert result.state == "SUCCESS"
    rig.check([result.id])
    record = rig.record(result.id)
    assert record["claims"] == "2"
    assert record["deaths"] == "0", "a fault of the engine is no death"
    rig.until(lambda: not rig.leases()[0]["tasks"])
    rig.check_nothing_left()


def test_a_client_s_task_is_retried(rig: Rig) -> None:
    rig.worker(STUB_FAULTS=1)
    ids = rig.fill(8, max_tokens=20, n=2)
    rig.check(ids)
    assert {rig.record(task_id)["claims"] for task_id in ids} == {"2"}
    assert not rig.redis.keys("celery-task-meta-*"), "its result is ignored, also in a retry"


def test_when_one_choice_fails_the_others_do_not_run_on(rig: Rig, tmp_path: Path) -> None:
    """The retry makes them all again: what the engine went on with would only take room. It is held up until then: how
    far it would have gone on is no matter of time."""
    rig.worker(STUB_FAULTS=1, STUB_FAULT_CHOICE=1, STUB_HOLD_AT=45, STUB_GO=tmp_path / "go")
    (task_id,) = rig.fill(1, max_tokens=80, n=3)
    rig.until(lambda: rig.record(task_id).get("claims") == "2")
    (tmp_path / "go").touch()
    rig.check([task_id])
    assert rig.record(task_id)["claims"] == "2"
    rig.until(lambda: rig.leases() and not rig.leases()[0]["tasks"])
    extra = rig.leases()[0]["generated_tokens"] - 3 * 80
    assert extra < 40, "no more than was made until the engine heard of it"


def test_a_retry_may_run_on_another_worker(rig: Rig) -> None:
    first = rig.worker(times=LATE, STUB_FAULTS=1)
    (task_id,) = rig.fill(1, max_tokens=20)
    rig.until(lambda: rig.status(task_id) == "queued" and rig.tokens(task_id))
    rig.kill(first)
    rig.worker()
    rig.check([task_id])


@pytest.mark.parametrize("plain", [True, False])
def test_when_no_retry_is_left_it_fails(rig: Rig, plain: bool) -> None:
    rig.worker(STUB_FAULTS=9, max_retries=1)
    if plain:
        result = rig.sender().send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": 3, "max_tokens": 20})
        task_id = result.id
    else:
        (task_id,) = rig.fill(1, max_tokens=20)
    rig.check([task_id], "failed")
    record = rig.record(task_id)
    assert "a fault of the stub" in record["error"]
    assert record["claims"] == "2"
    if plain:
        assert result.state == "FAILURE"
        with pytest.raises(Exception, match="a fault of the stub"):
            result.get(timeout=PATIENCE_S)
    rig.until(lambda: not rig.leases()[0]["tasks"])
    rig.check_nothing_left()


def test_cancelled_between_two_tries_it_never_runs_again(rig: Rig) -> None:
    rig.worker(times=LATE, STUB_FAULTS=1)
    (task_id,) = rig.fill(1, max_tokens=20)
    rig.until(lambda: rig.status(task_id) == "queued" and rig.tokens(task_id))
    before = rig.tokens(task_id)
    assert rig.cancel(task_id) == [1, "cancelled"]
    rig.check([task_id], "cancelled")
    assert rig.tokens(task_id) == before + 1
