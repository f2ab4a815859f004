"""Trims the outbox, and tells of webhooks that nobody delivers.

Rows that were delivered are kept for a while to be shown and replayed, dead ones for longer. Rows that are due are
never removed: they wait for a `penstock webhooks` process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.store.outbox import State, backlog, trim

log = logging.getLogger(__name__)

#: Time (s) for which delivered rows are kept, and the most of them: they are there to look at.
DELIVERED_KEPT_S: Final = 7 * 24 * 3600.0
DELIVERED_MOST: Final = 100_000
#: Time (s) for which dead rows are kept; they may be replayed until then, however many there are.
DEAD_KEPT_S: Final = 30 * 24 * 3600.0
DEAD_MOST: Final = 2**53
#: Time (s) for which a row may be due before the log says that nobody takes it.
LATE_S: Final = 60.0
#: Rows removed in a call.
LIMIT: Final = 500


@dataclass(frozen=True, slots=True)
class Trimmed:
    delivered: int = 0
    dead: int = 0


async def sweep(
    store: Redis, delivered_kept_s: float = DELIVERED_KEPT_S, dead_kept_s: float = DEAD_KEPT_S, late_s: float = LATE_S
) -> Trimmed:
    """Trim all that is old, and warn if rows are late. Raises redis.exceptions.RedisError or OSError."""
    now = await backlog(store)
    if now.oldest_due_s > late_s:
        warn_throttled(
            log,
            "%d webhooks are to be delivered, and one has been due for a while: start `penstock webhooks`, or more of"
            " them, if this is said again (due since %.0f s)",
            now.rows["due"],
            now.oldest_due_s,
        )
    delivered = await _all(store, "delivered", delivered_kept_s, DELIVERED_MOST)
    return Trimmed(delivered, await _all(store, "dead", dead_kept_s, DEAD_MOST))


async def _all(store: Redis, state: State, age_s: float, most: int) -> int:
    total = 0
    while True:
        count = int(await arun(store, trim(state, age_s, most, LIMIT)))
        total += count
        if count < LIMIT:
            return total
