"""Removes files whose end has come, and what dead processes left of files (`producers.store.files`)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.store import files
from producers.store.blobs import Blobs

log = logging.getLogger(__name__)

#: Most files that are removed in one sweep.
PAGE: Final = 1000
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
    for file_id in await files.expired(store, PAGE):
        removed.expired += await _removed(store, blobs, file_id)
    for file_id in await files.left_behind(store, PAGE):
        removed.left += await _removed(store, blobs, file_id)
    removed.halves = await asyncio.to_thread(blobs.clean, UPLOAD_S)
    return removed


async def _removed(store: Redis, blobs: Blobs, file_id: str) -> bool:
    try:
        await files.remove(store, blobs, file_id)
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:  # others can be removed all the same
        warn_throttled(log, "a file's content cannot be removed: %s", error)
        return False
    return True
