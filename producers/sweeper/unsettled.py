"""Settles final tasks whose messages no worker acknowledges.

    CANCEL, EXPIRE, UNREAD or FINISH made a record final -> `penstock:unsettled` -> its message's CLAIM, tracer, SETTLE
    ... but the worker died, the message is gone, or its pool has no worker: for a while -> ORPHAN

What a client sent needs no message: it asks for no result and has no links. A plain Celery task's links and chord stand
in its message alone, and one that was given up leaves its message as a dead letter: those are left to whoever gets the
message, for a week. Who waits for a plain task's result is told it meanwhile (`producers.sweeper.celery_results`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from producers.client.steps import FAILURES, Read, Steps, lost
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import ms, text
from producers.contract import keys
from producers.store import protocol

log = logging.getLogger(__name__)

#: Time (ms) after which a final task is checked. Its worker has settled it by then, or its lease has lapsed.
AGE_MS: Final = 15_000
#: Time (ms) after which a task is settled without its message.
PATIENCE_MS: Final = 7 * 24 * 3600 * 1000
#: Ids read at a time.
PAGE: Final = 200
#: Number of sweeps after which tasks that were left are checked again.
ALL_EVERY: Final = 6


@dataclass(slots=True)
class Orphans:
    """A sweeping process's memory of which unsettled tasks it has checked."""

    age_ms: int = AGE_MS
    patience_ms: int = PATIENCE_MS
    waiting: Callable[[str], None] = lambda task_id: None
    """Called now and then with each task that waits for its message."""
    _round: int = field(init=False, default=0)
    _after: int = field(init=False, default=0)

    def sweep(self) -> Steps[int]:
        """Settle orphaned tasks. Returns their number. Raises redis.exceptions.RedisError or OSError."""
        (time,) = yield Read((("TIME",),))
        now = ms(time)
        until = now - self.age_ms
        after = 0 if self._round % ALL_EVERY == 0 else self._after
        settled = kept = 0
        while True:
            query = ("ZRANGEBYSCORE", keys.UNSETTLED, f"({after}", until, "WITHSCORES", "LIMIT", kept, PAGE)
            (page,) = yield Read((query,))
            for task_id, at in zip(map(text, page[::2]), page[1::2], strict=True):
                gone = int(float(at)) < now - self.patience_ms
                answer = yield from self._one(task_id, gone)
                settled += answer == "settled"
                kept += answer in ("owned", "message", "unusable")
            if len(page) < 2 * PAGE:
                break
        self._round, self._after = self._round + 1, until
        return settled

    def _one(self, task_id: str, gone: bool) -> Steps[str]:
        try:
            answer = text((yield protocol.orphan(task_id, gone=gone)))
        except FAILURES as error:
            if lost(error):
                raise
            if gone:
                log.error("task %s is final and could not be settled for a week: left as it is: %s", task_id, error)
                yield Read((("ZREM", keys.UNSETTLED, task_id),))
                return "left"
            warn_throttled(log, "Task %s is final and cannot be settled, trying again: %s", task_id, error)
            return "unusable"
        if answer == "message":
            self.waiting(task_id)
        elif answer == "settled" and gone:
            log.warning("task %s is settled without its message, which nobody brought: its links are not sent", task_id)
        return answer
