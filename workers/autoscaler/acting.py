"""Passes the target to one pool's actuator, beside the ticks: a slow platform delays no other pool.

set_target(number) ─▶ read the state ─▶ does this process still lead? ─▶ scale ─▶ read again, soon
                          ▲ refused: again after 1 s, 2 s, ... 60 s
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import error_text
from workers.autoscaler.actuators import Actual, Actuator

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Time limit (s) of one call of an actuator.
CALL_S: Final = 9.0
#: Pause (s) after an actuator's first error, and the longest. Each is twice the one before.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
#: Pause (s) until the platform's state is read after a change.
SOON_S: Final = 1.0


class Acting:
    """One actuator, and its last answer. Run `run` as a task.

    `may`: whether this process may act now; called right before each call that changes something. `look`: longest time
    (s) between two readings of the state.
    """

    def __init__(self, actuator: Actuator, may: Callable[[], bool], look: float) -> None:
        self.actuator = actuator
        self.actual: Actual | None = None
        self.refused = ""
        """The text of the actuator's last error; empty after an answer."""
        self._may, self._look = may, look
        self._target: int | None = None
        self._first: Sequence[str] = ()
        self._changed = asyncio.Event()
        self._errors = 0

    def set_target(self, target: int, first: Sequence[str]) -> None:
        """Sets the number of workers to run. `first`: as in `Actuator.scale`."""
        self._first = first
        if target != self._target:
            self._target = target
            self._changed.set()

    def wake(self) -> None:
        """Look at once."""
        self._changed.set()

    async def run(self) -> None:
        """Act until cancelled."""
        while True:
            self._changed.clear()
            pause = await self._once()
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _once(self) -> float:
        """Reads the state, and acts if something is to change. Returns the pause (s) until the next reading."""
        try:
            before, actual = self.actual, await self._called(self.actuator.actual())
            self.actual, target = actual, self._target
            changes = target is not None and actual.wanted != target
            # The next tick judges a start that has just failed: it may not want another try yet.
            failed = before is not None and actual.failures > before.failures
            if target is not None and (changes or (actual.up < target and not failed)) and self._may():
                if changes:
                    log.info("%s: from %d to %d workers", self.actuator.name, actual.wanted, target)
                await self._called(self.actuator.scale(target, self._first))
        except OSError as error:
            pause = self._failed(
                f"no answer for {CALL_S:g} s" if isinstance(error, TimeoutError) else error_text(error)
            )
            warn_throttled(log, "%s fails, trying again: %s", self.actuator.name, self.refused)
            return pause
        except Exception as error:  # a fault of ours in one actuator must not end the others' scaling
            log.exception("%s failed here, trying again", self.actuator.name)
            return self._failed(f"{type(error).__name__}: {error}")
        self._errors, self.refused = 0, ""
        return min(SOON_S, self._look) if changes else self._look

    async def _called(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(CALL_S):
            return await call

    def _failed(self, why: str) -> float:
        """Note an error. Returns the pause (s) until the next try."""
        self.refused = why
        self._errors += 1
        return min(FIRST_PAUSE_S * 2.0 ** min(self._errors - 1, 20), LONGEST_PAUSE_S)
