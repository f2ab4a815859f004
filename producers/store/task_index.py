"""The index of tasks, `penstock:tasks`: ids of tasks that clients submitted, by the time of ADMIT.

ADMIT enters a task whose `origin` is `task`. An entry outlives its record until the leading sweeper trims it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import Call, arun, script, text
from producers.contract import keys

#: Entries that one call of TRIM_TASKS looks at.
PAGE: Final = 500
#: Calls in one round of the sweeper; and how many more, while at least a quarter of the entries go.
CALLS, MORE = 100, 2000

Command = tuple[str | int, ...]


def entries(low: str, high: str, count: int, *, newest_first: bool) -> Command:
    """The command for up to `count` entries between two scores (as of ZRANGEBYSCORE). `read_entries` reads it."""
    command, bounds = ("ZREVRANGEBYSCORE", (high, low)) if newest_first else ("ZRANGEBYSCORE", (low, high))
    return (command, keys.TASKS, *bounds, "WITHSCORES", "LIMIT", 0, count)


def read_entries(answer: Sequence[Any]) -> list[tuple[int, str]]:
    """(time of ADMIT in ms, task id) of each entry."""
    return [(int(float(at)), text(name)) for name, at in zip(answer[::2], answer[1::2], strict=True)]


def trim_call(cursor: int) -> Call:
    """TRIM_TASKS: remove entries without a record. Answers `[next cursor, looked at, removed]`."""
    return Call(script(__package__, "trim_tasks"), (keys.TASKS,), (cursor, PAGE))


async def trim(store: Redis, cursor: int) -> tuple[int, int]:
    """Go on trimming at `cursor`, a bounded part of the index. Returns the next cursor, and how many entries went.

    Raises redis.exceptions.RedisError or OSError.
    """
    total = 0
    for calls in range(1, MORE):
        cursor, looked, removed = map(int, await arun(store, trim_call(cursor)))
        total += removed
        if cursor == 0 or (calls >= CALLS and 4 * removed < looked):
            break
    return cursor, total
