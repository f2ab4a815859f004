"""Trims the outbox, and tells of webhooks and replies that nobody delivers.

Rows that were delivered are kept for a while to be shown and replayed, dead ones for longer. Webhooks that are due are
never removed: they wait for a `penstock webhooks` process. Replies wait for a process that runs their source, which
may be gone for good: after a while they are dead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, arun
from producers.store.outbox import Due, backlog, trim, untaken

log = logging.getLogger(__name__)

#: Time (s) for which delivered rows are kept, and the most of them: they are there to look at.
DELIVERED_KEPT_S: Final = 7 * 24 * 3600.0
DELIVERED_MOST: Final = 100_000
#: Time (s) for which dead rows are kept; they may be replayed until then, however many there are.
DEAD_KEPT_S: Final = 30 * 24 * 3600.0
DEAD_MOST: Final = 2**53
#: Time (s) for which a reply may be due, and nobody takes it, before it is dead.
UNTAKEN_S: Final = 30 * 24 * 3600.0
#: Time (s) for which a row may be due before the log says that nobody takes it.
LATE_S: Final = 60.0
#: Rows removed in a call.
LIMIT: Final = 500


@dataclass(frozen=True, slots=True)
class Trimmed:
    delivered: int = 0
    dead: int = 0
    untaken: int = 0
    """Replies that are dead from now on, since nobody took them."""


async def sweep(
    store: Redis,
    delivered_kept_s: float = DELIVERED_KEPT_S,
    dead_kept_s: float = DEAD_KEPT_S,
    untaken_s: float = UNTAKEN_S,
    late_s: float = LATE_S,
) -> Trimmed:
    """Trim all that is old, and warn if rows are late. Raises redis.exceptions.RedisError or OSError."""
    now = await backlog(store)
    _tell({place: due for place, due in now.due.items() if due.oldest_s > late_s})
    sources = [place for place in now.due if place is not None]
    given_up = sum([await _all(store, partial(untaken, source, untaken_s)) for source in sources])
    delivered = await _all(store, partial(trim, "delivered", delivered_kept_s, DELIVERED_MOST))
    dead = await _all(store, partial(trim, "dead", dead_kept_s, DEAD_MOST))
    return Trimmed(delivered, dead, given_up)


def _tell(late: Mapping[str | None, Due]) -> None:
    if webhooks := late.get(None):
        warn_throttled(
            log,
            "%d webhooks are to be delivered, and one has been due for a while: start `penstock webhooks`, or more of"
            " them, if this is said again (due since %.0f s)",
            webhooks.rows,
            webhooks.oldest_s,
        )
    replies = [f"{one.rows} of {source}, due since {one.oldest_s:.0f} s" for source, one in late.items() if source]
    if replies:
        warn_throttled(
            log,
            "replies are to be sent, and nobody takes them: start `penstock sources` with these sources, or more of"
            " them, if this is said again (%s)",
            "; ".join(replies),
        )


async def _all(store: Redis, step: Callable[[int], Call]) -> int:
    """Call as long as there may be more. Returns how many rows there were."""
    total = 0
    while True:
        count = int(await arun(store, step(LIMIT)))
        total += count
        if count < LIMIT:
            return total
