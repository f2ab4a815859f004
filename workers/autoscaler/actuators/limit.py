"""Time limits of platforms' answers: an actuator that hangs must not hold up the other pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from workers.autoscaler.actuators.base import ActuatorError

#: Longest time (s) that one call of an actuator takes.
LIMIT_S: Final = 9.0


@asynccontextmanager
async def limited(name: str) -> AsyncIterator[None]:
    """Within it, what takes longer is given up with an ActuatorError."""
    try:
        async with asyncio.timeout(LIMIT_S):
            yield
    except TimeoutError as error:
        raise ActuatorError(f"{name} did not answer within {LIMIT_S:g} s") from error
