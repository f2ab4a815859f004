"""The indexes of tasks: ids by the time of ADMIT.

    penstock:tasks             those that clients submitted   penstock:tasks:<tenant>       a tenant's
    penstock:requests          those of OpenAI's endpoints    penstock:requests:<tenant>    a tenant's
    penstock:tenants           the tenants that have one

ADMIT enters a task whose `origin` is `task` into the first, and others into the second, which has the last 10,000.
Lines of batches are in neither. An entry outlives its record until the leading sweeper trims it. A list of one tenant
reads that tenant's indexes alone: neither its answer nor its time shows other tenants' tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import Call, arun, script, text
from producers.contract import keys

#: Entries that one call of TRIM_TASKS looks at.
PAGE: Final = 500
#: Calls in one round of the sweeper; and how many more, while at least a quarter of the entries go.
CALLS, MORE = 100, 2000

Command = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TrimPosition:
    """The next place to trim: a cursor of an index of a tenant's; '' is that of all."""

    tenant: str = ""
    index: str = ""
    cursor: int = 0


def tasks_of(tenant: str | None) -> str:
    """The index of a tenant's tasks; that of all without one."""
    return keys.tasks(tenant) if tenant else keys.TASKS


def requests_of(tenant: str | None) -> str:
    """The index of a tenant's requests; that of all without one."""
    return keys.requests(tenant) if tenant else keys.REQUESTS


def entries(name: str, low: str, high: str, count: int, *, newest_first: bool) -> Command:
    """The command for up to `count` entries of an index between two scores (as of ZRANGEBYSCORE). `read_entries` reads
    it."""
    command, bounds = ("ZREVRANGEBYSCORE", (high, low)) if newest_first else ("ZRANGEBYSCORE", (low, high))
    return (command, name, *bounds, "WITHSCORES", "LIMIT", 0, count)


def read_entries(answer: Sequence[Any]) -> list[tuple[int, str]]:
    """(time of ADMIT in ms, task id) of each entry."""
    return [(int(float(at)), text(name)) for name, at in zip(answer[::2], answer[1::2], strict=True)]


def trim_call(position: TrimPosition) -> Call:
    """TRIM_TASKS: remove entries without a record. Answers `[next cursor, looked at, removed]`."""
    return Call(script(__package__, "trim_tasks"), (position.index,), (position.cursor, PAGE, position.tenant))


async def trim(store: Redis, position: TrimPosition) -> tuple[TrimPosition, int]:
    """Go on trimming at a place, a bounded part of the indexes. Returns the next place, and how many entries went.

    Raises redis.exceptions.RedisError or OSError.
    """
    names = ["", *sorted(text(name) for name in await store.smembers(keys.TENANTS))]
    indexes = [(name, index) for name in names for index in (requests_of(name), tasks_of(name))]  # sorted, too
    remaining = [each for each in indexes if each >= (position.tenant, position.index)]
    total = 0
    for calls in range(1, MORE):
        if not remaining:
            return TrimPosition(), total
        tenant, index = remaining[0]
        position = position if (position.tenant, position.index) == remaining[0] else TrimPosition(tenant, index)
        cursor, looked, removed = map(int, await arun(store, trim_call(position)))
        position, total = TrimPosition(tenant, index, cursor), total + removed
        if cursor == 0:
            remaining.pop(0)
            position = TrimPosition(tenant, index + "\0")
        if calls >= CALLS and 4 * removed < looked:
            break
    return position, total
