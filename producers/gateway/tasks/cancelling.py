"""Cancels a task whose caller waits for its end."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from producers.client.aio import AsyncHandle
from producers.contract.record import Record

#: Time (s) for which a cancel waits for the task's worker, which needs a step.
CANCEL_S: Final = 1.0


async def cancelled(handle: AsyncHandle) -> tuple[bool, Record]:
    """Cancel a task. Returns whether that was accepted, and its record: final, unless its worker takes too long.

    Raises TaskNotFound, redis.exceptions.RedisError or OSError.
    """
    accepted = await handle.cancel()
    give_up, pause = time.monotonic() + CANCEL_S, 0.01
    while not (record := await handle.status()).final and time.monotonic() < give_up:
        await asyncio.sleep(pause)
        pause = min(0.1, 1.5 * pause)
    return accepted, record
