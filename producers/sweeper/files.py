"""Removes files whose end has come, and what dead processes left of files (`producers.store.files`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.store import files
from producers.store.blobs import Blobs

log = logging.getLogger(__name__)

#: Files that are looked up at a time, and removed at a time: a bucket takes its time for each.
PAGE: Final = 1000
AT_ONCE: Final = 16
#: Time (s) after which an upload that nobody has written to counts as dead: gateways cut off slow ones long before.
UPLOAD_S: Final = 3600.0


@dataclass(slots=True)
class Removed:
    """`expired`: files. `left`: contents that no file stands for. `halves`: of uploads."""

    expired: int = 0
    left: int = 0
    halves: int = 0


async def remove_files(store: Redis, blobs: Blobs) -> Removed:
    """Remove them once. Raises redis.exceptions.RedisError, and OSError if the folder cannot be reached."""
    removed = Removed()
    removed.expired = await _all(files.expired, files.remove, store, blobs)
    removed.left = await _all(files.left_behind, files.remove_left_behind, store, blobs)
    removed.halves = await asyncio.to_thread(blobs.clean, UPLOAD_S)
    return removed


async def _all(
    find: Callable[[Redis, int], Awaitable[list[str]]],
    remove: Callable[[Redis, Blobs, str], Awaitable[bool]],
    store: Redis,
    blobs: Blobs,
) -> int:
    """Remove all that is found, a page at a time, some at once. Returns how many."""
    done, at_once = 0, asyncio.Semaphore(AT_ONCE)

    async def one(name: str) -> bool:
        async with at_once:
            try:
                await remove(store, blobs, name)
            except (PermissionError, NotADirectoryError, IsADirectoryError) as error:  # others can be removed
                warn_throttled(log, "a file's content cannot be removed: %s", error)
                return False
            return True

    while names := await find(store, PAGE):
        removed = sum(await asyncio.gather(*map(one, names)))
        done += removed
        if len(names) < PAGE or not removed:
            break
    return done
