"""Where a device has no memory left for a step: smaller steps, and one sequence less, in place of a death.

a step fails -> half as large, planned again -> ... -> its sequences alone -> one fails: its own error
                                                                           -> one after the other: the device's
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger("penstock.engine")


class Shrink:
    """Used by the thread that steps."""

    def __init__(
        self, scheduler: Scheduler, state: threading.Lock, release: Callable[[BaseException], bool] | None
    ) -> None:
        """`state` is held while the scheduler changes. `release` says whether an error is a lack of memory, and if so
        gives back what is not in use; None where that is never known."""
        self._scheduler = scheduler
        self._state = state
        self._release = release
        self._answered = False
        self._starved: set[str] = set()

    def answer(self, error: BaseException | None) -> bool:
        """What a step failed with. True where its rows are to be planned again: as long as steps can be made smaller,
        and else once, until a step has gone well. After that whoever is in it shows by running alone whether it is to
        blame. Steps stay as small: what took the memory once may do so again.
        """
        if error is None or self._release is None or not self._release(error):
            return False
        with self._state:
            # Nobody is put out of a plan whose rows are then run apart.
            again = self._scheduler.shrink(time.monotonic(), tried=self._answered)
            now = self._scheduler.step_tokens
        self._answered = True
        logger.warning(
            "the device has no memory for a step; steps are of %d tokens now, and %s",
            now,
            "this one is planned again" if again else "the sequences of this one run alone",
        )
        return again

    def alone(self, request_id: str, error: BaseException) -> bool:
        """A sequence of that request failed by itself. True where it is not to blame: another had not the memory for
        that either, and nobody's step has gone well since. Then somebody else has taken the memory."""
        if self._release is None or not self._release(error):
            return False
        self._starved.add(request_id)
        return len(self._starved) > 1

    def went_well(self) -> None:
        """A step has got to its end."""
        self._answered = False
        self.had_memory()

    def had_memory(self) -> None:
        """A part of a step has got to its end."""
        self._starved.clear()
