"""What is not wanted any more is computed for one step at most after the worker has heard of it; steps are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from producers.contract import keys
from producers.store.protocol import cancel, claim
from tests.processes import Worker
from tests.workers.rig import POOL, Rig


def begin(rig: Rig, *plugins: str) -> tuple[Worker, str]:
    """A worker at two tasks, of which one goes on. Its plugins see the engine and all else in one process."""
    names = ",".join(f"tests.workers.plugins:{name}" for name in ("counts_steps", *plugins))
    worker = rig.worker(engine_process=False, STUB_STEP_S=0.3, WORKER_PLUGINS=names, SEEN_URL=rig.url)
    unwanted, _ = rig.fill(2, max_tokens=2000)
    rig.until(lambda: rig.tokens(unwanted) > 2)
    rig.until(lambda: rig.redis.pubsub_numsub(keys.control(rig.record(unwanted)["owner"]))[0][1] == 1)
    return worker, unwanted


def steps(rig: Rig) -> list[Any]:
    rig.until(lambda: rig.redis.llen("steps"))
    return [json.loads(said) for said in rig.redis.lrange("steps", 0, -1)]


@pytest.mark.parametrize("slow", [False, True], ids=["at once", "while the store takes nothing"])
def test_a_cancel_that_comes_by_word_frees_memory_within_a_step(rig: Rig, slow: bool) -> None:
    _, unwanted = begin(rig)
    accept = cancel(unwanted)
    rig.store.script_load(accept.script.text)
    with rig.store.pipeline(transaction=True) as pipe:
        pipe.execute_command(*accept.command)
        if slow:  # CANCEL is through, and no FINISH for as long as ten steps
            pipe.execute_command("CLIENT", "PAUSE", 4000, "WRITE")
        pipe.execute()
    ((why, count),) = steps(rig)
    # Where the store answers, an APPEND may tell of it first.
    assert why in (("word",) if slow else ("word", "cancel"))
    assert count <= 1
    rig.check([unwanted], "cancelled")


def test_a_cancel_that_is_told_with_an_append_frees_memory_within_a_step(rig: Rig) -> None:
    _, unwanted = begin(rig, "hears_no_word")
    assert rig.cancel(unwanted) == [1, "in_progress"]
    ((why, count),) = steps(rig)
    assert (why, count <= 1) == ("cancel", True), count
    rig.check([unwanted], "cancelled")


def test_who_was_superseded_aborts_within_a_step_of_hearing_it(rig: Rig) -> None:
    """Another incarnation has its task: it was taken for dead."""
    worker, unwanted = begin(rig)
    (mine,) = worker.incarnations
    taken = claim(unwanted, "another-delivery", "other", POOL)
    rig.store.script_load(taken.script.text)
    with rig.store.pipeline(transaction=True) as pipe:  # at once: it is not to see its own lease gone
        pipe.rename(keys.lease(mine), "aside")
        pipe.set(keys.lease("other"), "{}")
        pipe.execute_command(*taken.command)
        pipe.rename("aside", keys.lease(mine))
        _, _, (answer, *_), _ = pipe.execute()
    assert answer == "go"
    made = rig.tokens(unwanted)
    ((why, count),) = steps(rig)
    assert (why, count <= 1) == ("other", True), count
    assert rig.tokens(unwanted) == made, "and nothing of it was taken"
    assert worker.process.poll() is None
