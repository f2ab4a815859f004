"""An idle worker asks for nothing, and still begins at once."""

from __future__ import annotations

import time

from producers.contract import keys
from tests.processes import fill
from tests.waiting import PATIENCE_S
from tests.workers.rig import MODEL, QUEUE, Rig

NEVER_IDLE = "tests.workers.plugins:never_looks_idly"


def test_a_worker_that_never_looks_by_itself_is_woken(rig: Rig) -> None:
    """By a message, by another sender's message, and by room that was freed."""
    rig.worker(STUB_SEQS=2, STUB_STEP_S=0.002, WORKER_PLUGINS=NEVER_IDLE)
    app = rig.sender()
    for _ in range(3):
        ids = fill(rig.redis, QUEUE, 5, max_tokens=5)
        ids += fill(rig.redis, MODEL, 2, tier="batch", max_tokens=5)
        rig.check(ids)
        result = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 2}, priority=6)
        assert result.get(timeout=PATIENCE_S)["status"] == "completed"


def test_it_is_woken_again_after_its_wake_up_connection_broke(rig: Rig) -> None:
    rig.worker(WORKER_PLUGINS=NEVER_IDLE)
    ids = rig.fill(1)
    rig.until_settled(ids)
    for client in rig.redis.client_list():
        if client["resp"] == "3":
            rig.redis.client_kill_filter(_id=client["id"])
    late = rig.fill(3)
    rig.check(late)


def test_an_idle_worker_asks_for_next_to_nothing(rig: Rig) -> None:
    """In three seconds: some looks for what comes due, the lease, and a dozen for workers that join. Polling every
    20 ms would be 150 looks."""
    rig.worker(lease=10.0, times={})
    ids = rig.fill(2)
    rig.until_settled(ids)
    rig.check_nothing_left()
    began, before = time.monotonic(), _calls(rig)
    time.sleep(3)
    rig.until(lambda: _calls(rig)["evalsha"] > before["evalsha"])
    calls = {name: count - before.get(name, 0) for name, count in _calls(rig).items()}
    more = (time.monotonic() - began) / 3  # where we were held up, and it was not
    assert calls["evalsha"] <= 15 * more
    asked = sum(calls.get(name, 0) for name in ("set", "get", "brpop", "hkeys", "hgetall", "xrange", "publish"))
    assert asked <= 35 * more


def _calls(rig: Rig) -> dict[str, int]:
    stats = rig.redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
