"""The epoch of a store: another one since each restore of a backup into it.

    none: a store that was never restored        restoring: nothing may start        open: as always

`penstock:epoch` is a hash: `id`, `state`, `backup` (its id) and `at` (ms). LEASE and LEAD compare the epoch with that
in which their caller began; other processes `watch` it. A process that began in another epoch knows what is not there
any more, so it ends (`docs/run/backup.md`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import text
from producers.contract import keys
from producers.errors import PenstockError

log = logging.getLogger(__name__)

RESTORING: Final = "restoring"
OPEN: Final = "open"
#: LEASE's and LEAD's answer to a caller of another epoch.
OTHER: Final = -1
#: Time (s) between two looks.
LOOK_S: Final = 1.0
CHANGED: Final = (
    "the store was restored from a backup, and this process began before that: it ends, to be started again "
    "(docs/run/backup.md)"
)


class EpochChanged(PenstockError):
    """The store was restored since this process began."""

    def __init__(self) -> None:
        super().__init__(CHANGED)


def read(store: Redis) -> str:
    """The id of the epoch; empty without one. Raises redis errors."""
    epoch_id: Any = store.hget(keys.EPOCH, "id")
    return text(epoch_id or b"")


async def aread(store: AsyncRedis) -> str:
    """`read` for asyncio."""
    return text(await store.execute_command("HGET", keys.EPOCH, "id") or b"")


async def watch(store: AsyncRedis, changed: Callable[[], object]) -> None:
    """Call `changed`, once, when the epoch is another one than at the first look. Runs until then, or cancelled."""
    first: str | None = None
    while True:
        try:
            now = await aread(store)
            if first is not None and now != first:
                log.error("%s", CHANGED)
                changed()
                return
            first = now
        except (RedisError, OSError) as error:  # a store that is away, or lets this user read no epoch
            warn_throttled(log, "cannot look at the store's epoch, trying again: %s", error)
        await asyncio.sleep(LOOK_S)
