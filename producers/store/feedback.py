"""Feedback: a score from 0 to 1 that an application or its user gives to a finished task.

FEEDBACK writes it into the task's record (`feedback`), once, and appends a row to the stream `penstock:feedback` (the
latest KEPT): the task's `model`, `version`, `alias`, `tier` and `created`, `drawn` as in the ledger, and the `score`.
Rollouts that judge compare the rows of two versions (`producers.rollouts.metrics`).
"""

from __future__ import annotations

from typing import Final

from producers.connection.script import Call, script
from producers.contract import keys
from producers.store.protocol import PACKAGE

#: Rows that are kept, about.
KEPT: Final = 100_000
#: Answers of FEEDBACK beside 1, done.
NO_TASK, OTHER_SCORE, NOT_FINISHED = 0, -1, -2


def give(task_id: str, score: float) -> Call:
    """FEEDBACK. `score`: from 0 to 1. Answers 1, or one of the constants above; may be called again."""
    return Call(script(PACKAGE, "feedback"), (keys.task(task_id), keys.FEEDBACK), (f"{score:.4g}", KEPT))
