"""Erases what is left of deleted tasks outside the reach of DELETE.

    DELETE: the id enters `penstock:erasing` ─▶ its dead letters and its Celery result go ─▶ it leaves, LATE_S later

Dead letters are the broker's, which may be another server. A worker or a sweeper that was about to store something of
the task when it was deleted may do so a moment later; therefore an id is looked for until that can be no more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from producers.admin.dead_letters import letters, purge
from producers.backup.journal import Journal
from producers.client.aio import AsyncClient
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import aexecute_many, ms, text
from producers.contract import keys

log = logging.getLogger(__name__)

#: Ids that are looked for at a time.
PAGE: Final = 1000
#: Time (s) after its DELETE for which more of a task may turn up: some leases of a worker.
LATE_S: Final = 60


@dataclass(slots=True)
class Erased:
    letters: int = 0
    results: int = 0


async def erase(client: AsyncClient, journal: Journal | None = None) -> Erased:
    """Erase once, what was deleted first before the rest. An id leaves once it is in the journal.

    Raises redis.exceptions.RedisError or OSError.
    """
    done = Erased()
    if journal is not None:
        await journal.keep()
    now, page = await aexecute_many(client.store, [("TIME",), ("ZRANGE", keys.ERASING, 0, PAGE - 1, "WITHSCORES")])
    deleted = {text(task_id): int(float(at)) for task_id, at in zip(page[::2], page[1::2], strict=True)}
    if not deleted:
        return done
    done.results = sum(
        await aexecute_many(client.store, [("UNLINK", keys.celery_result(task_id)) for task_id in deleted])
    )
    for letter in [letter async for letter in letters(client) if letter.task_id in deleted]:
        done.letters += await purge(client, letter)
    if journal is None and await client.store.exists(keys.JOURNAL):
        warn_throttled(
            log, "%d ids of what was deleted stay: a journal was kept, and this sweeper has no --journal", len(deleted)
        )
        return done
    if over := [task_id for task_id, at in deleted.items() if at < ms(now) - LATE_S * 1000]:
        await aexecute_many(client.store, [("ZREM", keys.ERASING, *over)])
    return done
