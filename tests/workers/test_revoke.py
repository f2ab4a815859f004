"""Celery's revoke reaches the record and the engine, wherever the task is by then."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from producers.contract import keys
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from tests.workers.test_orphaned_queues import sweeping


def send(app: Celery, max_tokens: int = 4, **options: Any) -> Any:
    return app.send_task(keys.TASK_NAME, kwargs={"prompt": [1, 2], "seed": 5, "max_tokens": max_tokens}, **options)


def check_revoked(rig: Rig, result: Any) -> None:
    """Everyone is told the same: result backend, record, stream; and nothing holds on to it."""
    rig.check([result.id], "cancelled")
    assert result.state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=PATIENCE_S)
    rig.until(lambda: all((lease["tasks"], lease["running"], lease["waiting"]) == (0, 0, 0) for lease in rig.leases()))
    rig.check_nothing_left()


def test_before_the_task_is_fetched(rig: Rig) -> None:
    app = rig.sender()
    rig.worker(STUB_SEQS=1, STUB_STEP_S=0.01)
    running, waiting = send(app, 4000), send(app)
    rig.until(lambda: rig.tokens(running.id))
    assert rig.waiting(keys.model_queue("stub")) == 1, "the second is still in the queue"
    waiting.revoke()
    revoked(rig, app, waiting.id)
    running.revoke(terminate=True)
    check_revoked(rig, waiting)
    check_revoked(rig, running)
    assert rig.entries(waiting.id)[:-1] == []


def test_while_no_worker_is_up(rig: Rig) -> None:
    """A sweeper hears it: of a task that no worker has seen, and of one that its worker has handed back."""
    app = rig.sender()
    worker = rig.worker(STUB_STEP_S=0.01, drain=0.0)
    begun = send(app, 4000)
    rig.until(lambda: rig.tokens(begun.id))
    worker.stop()
    with sweeping(rig):
        rig.until(lambda: rig.redis.pubsub_channels("*pidbox*"))
        unseen, other = send(app), send(app)
        app.control.revoke([unseen.id, begun.id])
        rig.until(lambda: rig.redis.zscore(keys.REVOKED, unseen.id))
        rig.until(lambda: rig.status(begun.id) == "cancelled")
    rig.worker()
    rig.check([other.id])
    check_revoked(rig, unseen)
    check_revoked(rig, begun)
    assert rig.entries(unseen.id)[:-1] == []


def test_while_it_waits_for_its_countdown(rig: Rig) -> None:
    app = rig.sender()
    rig.worker()
    result = send(app, countdown=8)
    result.revoke()
    check_revoked(rig, result)
    assert rig.entries(result.id)[:-1] == []


def test_terminate_while_it_runs(rig: Rig) -> None:
    app = rig.sender()
    rig.worker(STUB_STEP_S=0.01)
    result = send(app, 4000)
    rig.until(lambda: rig.tokens(result.id) > 3)
    result.revoke(terminate=True)
    check_revoked(rig, result)
    assert 0 < len(rig.entries(result.id)) - 1 < 4000


def test_without_terminate_a_running_task_goes_on(rig: Rig) -> None:
    app = rig.sender()
    rig.worker(STUB_STEP_S=0.01)
    result = send(app, 100)
    rig.until(lambda: rig.tokens(result.id) > 3)
    result.revoke()
    assert result.get(timeout=PATIENCE_S)["status"] == "completed"
    rig.check([result.id])


def test_a_client_s_task_can_be_revoked_too(rig: Rig) -> None:
    app = rig.sender()
    rig.worker(STUB_STEP_S=0.01)
    (task_id,) = rig.begun(1, more_than=3, max_tokens=4000)
    app.control.revoke(task_id, terminate=True)
    rig.check([task_id], "cancelled")
    rig.until(lambda: rig.leases()[0]["running"] == 0)
    rig.check_nothing_left()


def test_many_at_once_while_they_run(rig: Rig) -> None:
    app = rig.sender()
    rig.worker(STUB_STEP_S=0.01)
    results = [send(app, 4000) for _ in range(30)]
    kept = send(app, 200)
    rig.until(lambda: all(rig.tokens(result.id) for result in results))
    app.control.revoke([result.id for result in results], terminate=True)
    for result in results:
        check_revoked_but_for(rig, result)
    rig.check([kept.id])
    rig.until(lambda: rig.leases()[0]["tasks"] == 0)
    rig.check_nothing_left()


def check_revoked_but_for(rig: Rig, result: Any) -> None:
    rig.check([result.id], "cancelled")
    assert result.state == "REVOKED"


def revoked(rig: Rig, app: Celery, task_id: str) -> None:
    """Wait until the one worker knows of it."""
    hostname = f"penstock@{rig.workers[0].name}"
    rig.until(lambda: task_id in app.control.inspect([hostname], timeout=60).revoked()[hostname])
