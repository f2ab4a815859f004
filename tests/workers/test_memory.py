"""What a worker keeps of tasks that are over: nothing, in any of its books or of Celery's."""

from __future__ import annotations

import pytest

from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig

PLUGINS = "tests.workers.plugins:ordinary_tasks,tests.workers.plugins:tells_its_books"


@pytest.mark.slow
def test_nothing_is_kept_of_hundreds_of_tasks(rig: Rig) -> None:
    worker = rig.worker(STUB_SEQS=64, WORKER_PLUGINS=PLUGINS)
    app = rig.sender()
    ids = []
    for _ in range(4):
        ids = rig.fill(90, max_tokens=2, timeout=3600.0)
        for seed in range(10):
            app.send_task("penstock.generate", kwargs={"prompt": [1], "seed": seed, "max_tokens": 2, "timeout": 3600.0})
        app.send_task("penstock.generate", kwargs={"prompt": []}, ignore_result=True)
        app.send_task("app.reject_once")
        app.send_task("no.such.task")
        app.send_task("app.exits")
        rig.until_settled(ids)
    cancelled = rig.begun(10, max_tokens=4000)
    app.control.revoke(cancelled[:5], terminate=True)
    for task_id in cancelled[5:]:
        rig.cancel(task_id)
    rig.until_settled(cancelled)
    rig.check(ids)
    rig.until(lambda: rig.redis.keys("penstock:inflight:*") == [])
    hostname = f"penstock@{worker.name}"
    kept: dict[str, int] = {}

    def empty() -> bool:
        assert app.send_task("app.add", (1, 2)).get(timeout=PATIENCE_S) == 3  # Celery flushes with the next message
        (answer,) = app.control.broadcast("books", destination=[hostname], reply=True, limit=1, timeout=60)
        kept.update(answer[hostname])
        return not any(kept.values())

    try:
        rig.until(empty)
    except AssertionError:
        raise AssertionError(f"still kept: {kept}") from None


def test_a_collection_does_not_go_through_what_a_worker_is_made_of_nor_wait_until_as_much_has_come(rig: Rig) -> None:
    """Some 60,000 objects with the stub engine, 220,000 with torch."""
    worker = rig.worker(warm=False, WORKER_PLUGINS="tests.workers.plugins:tells_what_is_collected")
    hostname = f"penstock@{worker.name}"
    (answer,) = rig.sender().control.broadcast("collected", destination=[hostname], reply=True, limit=1, timeout=60)
    asked, full = answer[hostname]
    assert asked < 30_000
    assert full >= 1
