"""The store's counts of tenants' waiting tasks: a broker's list tells of so many tenants only by samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from redis.asyncio import Redis

from producers.broker.values import NO_COUNTS, TenantCounts
from producers.connection.script import aexecute_many, text
from producers.contract import keys
from producers.contract.message import Message

#: With more tenants than this, reading their counts would take too long.
MOST: Final = 4000
#: The least of a tenant's waiting tasks that lists must show to tell of the others.
LISTED: Final = 0.9
#: The tenant's tasks whose tokens are looked up: in so many places of its list, so many at each.
PLACES, EACH = 16, 16


async def count(store: Redis, message: Message, since: float) -> TenantCounts:
    """`since`: when the task that has waited longest in its tier was submitted, unix s. Raises
    redis.exceptions.RedisError or OSError.

    The part of the tenant's tasks that came before it is that of those since then that lists show, if they are most of
    those that wait: lists show neither responses nor tasks whose caller waits on the connection.
    """
    index, first = keys.tasks(message.tenant), str(int(since * 1000))
    spans = (("-inf", f"({first}"), (first, f"({message.at}"), (first, "+inf"))
    commands = [("HLEN", keys.WAITING_TENANTS), *(("ZCOUNT", index, *span) for span in spans)]
    tenants, skipped, before, whole = await aexecute_many(store, commands)
    if not 0 < tenants <= MOST:
        return NO_COUNTS
    sizes_of = _look_up(index, skipped, before) if message.tenant else ()
    counts, *found = await aexecute_many(store, [("HGETALL", keys.WAITING_TENANTS), *sizes_of])
    waiting = {text(name): int(number) for name, number in counts.items()}
    sizes = [int(size) for some in found for size in some if size is not None and size.isdigit()]
    share = before / whole if whole and whole >= LISTED * waiting.get(message.tenant or "", 0) else None
    tokens = sum(sizes) / len(sizes) if sizes else None
    return TenantCounts(waiting, share, tokens)


def _look_up(index: str, first: int, count: int) -> Iterator[tuple[str | int, ...]]:
    """Commands for the tokens of tasks from all over `count` of an index, the first of which has the place `first`."""
    places = min(PLACES, -(-count // EACH))
    for place in range(places):
        at = first + place * count // places
        each = min(EACH, count - place * count // places)
        yield ("SORT_RO", index, "BY", "nosort", "LIMIT", at, each, "GET", f"{keys.task('*')}->tokens")
