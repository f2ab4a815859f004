"""What the store refuses, it refuses for one task: the others go on, and it is tried again without haste."""

from __future__ import annotations

from producers import keys
from tests.stub_engine import STALLED
from tests.workers.rig import Rig


def test_a_task_that_cannot_be_finished_holds_up_no_other(served: Rig) -> None:
    (stuck,) = served.fill(1, prompt=[STALLED])
    served.until(lambda: served.status(stuck) == "in_progress")
    served.until(lambda: served.redis.pubsub_numsub(keys.control(served.record(stuck)["owner"]))[0][1] == 1)
    served.redis.hset(keys.task(stuck), "n", "no number")
    assert served.cancel(stuck) == [1, "in_progress"]
    served.until(lambda: f"Cannot finish task {stuck}" in served.logs())
    others = served.fill(20)
    served.until_settled(others)
    served.check(others)
    assert served.logs().count(f"Cannot finish task {stuck}") < 20
    served.redis.hset(keys.task(stuck), "n", 1)
    served.until_settled([stuck])
    served.check([stuck], "cancelled")
