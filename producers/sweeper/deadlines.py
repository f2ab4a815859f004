"""Ends tasks without a worker whose deadline has passed or whose cancel was accepted.

A task that was started before (its worker died, or handed it back) is `incomplete` then; any other late one has failed.

The set `penstock:deadlines` holds unfinished tasks by when their deadline is, in server time, and cancelled ones that
CANCEL could not end, because a worker had them, or they were not sent yet. Whoever runs a task ends it himself; one
that is still `submitting` is first sent by the sweeper. Several may sweep: the second finds nothing.
"""

from __future__ import annotations

import logging
from typing import Final

from producers.client.steps import FAILURES, Read, Steps, lost
from producers.connection.script import ms, text
from producers.contract import keys
from producers.store import protocol

log = logging.getLogger(__name__)

#: Ids read at a time.
PAGE: Final = 200
#: Time (ms) after which a task with a broken record is tried again.
BROKEN_MS: Final = 3_600_000


def expire_late() -> Steps[int]:
    """End late and cancelled tasks. Returns their number. Raises redis.exceptions.RedisError or OSError."""
    (time,) = yield Read((("TIME",),))
    now = ms(time)
    ended = kept = 0
    while True:
        # Tasks that are left to others stay in the set, before those that are not read yet.
        query = ("ZRANGEBYSCORE", keys.DEADLINES, "-inf", now, "LIMIT", kept, PAGE)
        (page,) = yield Read((query,))
        for task_id in map(text, page):
            try:
                status = text((yield protocol.expire(task_id)))
            except FAILURES as error:
                if lost(error):
                    raise
                log.exception("task %s is past its deadline and cannot be ended, next try in an hour", task_id)
                yield Read((("ZADD", keys.DEADLINES, "XX", now + BROKEN_MS, task_id),))
                continue
            ended += status in ("failed", "incomplete", "cancelled")
            kept += status in ("submitting", "queued", "in_progress")
        if len(page) < PAGE:
            return ended
