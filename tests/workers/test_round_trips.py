"""What each task costs in calls: one more for every task is a price that no test of what is stored sees."""

from __future__ import annotations

from collections import Counter

from tests.chaos.tap import Tap
from tests.processes import valkey
from tests.workers.rig import Rig

TASKS = 100
#: Said of each task. All but APPEND go to the server many at a time, those of as many tasks as are at that point.
EACH = {"CLAIM", "FINISH", "ACK"}


def test_a_task_costs_no_more_calls_than_its_way_has_steps() -> None:
    """Its prompt came as text, so that the record is to be told how long it is."""
    with valkey() as (url, redis):
        tap = Tap(int(url.rpartition(":")[2].partition("/")[0]), lambda _, __: None, lambda: None, lambda _: None)
        rig = Rig(f"redis://127.0.0.1:{tap.port}/0", redis)
        try:
            rig.worker(times={})
            rig.until_settled(rig.fill(1, prompt="some text", max_tokens=1))  # from now on the server knows the scripts
            rig.check_nothing_left()
            before = len(tap.calls)
            ids = rig.fill(TASKS, prompt="some text", max_tokens=1)
            rig.until_settled(ids)
            rig.check_nothing_left()
            rig.check(ids)
            assert all("prompt_tokens" in rig.record(task_id) for task_id in ids)
        finally:
            rig.close()
            tap.close()
    calls = tap.calls[before:]
    about = Counter(call.kind for task_id in ids for call in calls if call.names(task_id))
    appends = about.pop("APPEND", 0)  # where the publisher comes to it late, all goes with FINISH
    assert about == dict.fromkeys(EACH, TASKS)
    assert appends <= 2 * TASKS, "more than the prompt's length, and the token"
    others = Counter(call.kind for call in calls if call.kind not in {*EACH, "APPEND", "FETCH"})
    assert not [kind for kind, count in others.items() if count >= TASKS], others
