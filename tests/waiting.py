"""Waiting for what comes about by itself. A minute is no limit: it is so long that nothing that works takes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait for a true answer, and give it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.005)
    return answer


def within(condition: Callable[[], Any], seconds: float = 60, every_s: float = 0.01) -> bool:
    """Whether it comes true in time. `every_s`: longer, where looking takes something from what is waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


async def auntil(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """`until` for asyncio."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.005)
    return answer
