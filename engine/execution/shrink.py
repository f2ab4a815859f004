"""Recovers from a lack of device memory: makes steps smaller and preempts one sequence, instead of failing.

a step fails -> half as large, planned again -> ... -> its sequences run alone -> one fails: it is to blame
                                                    -> two in turn fail: the device is to blame
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger("penstock.engine")


class Shrink:
    """Makes steps smaller after failures. Used by the thread that runs the steps."""

    def __init__(
        self, scheduler: Scheduler, state: threading.Lock, release: Callable[[BaseException], bool] | None
    ) -> None:
        """`state`: the lock held while the scheduler changes. `release`: returns whether an error is a lack of memory,
        and if so frees cached memory. None if that is never known."""
        self._scheduler = scheduler
        self._state = state
        self._release = release
        self._retried = False
        self._starved: set[str] = set()

    def on_failure(self, error: BaseException | None) -> bool:
        """React to a step's error. Returns True if its rows are to be planned again.

        That is so as long as steps can be made smaller, and else once, until a step succeeds. After that, each sequence
        runs alone, to find the one to blame. Steps stay small, because the lack of memory may come back.
        """
        if error is None or self._release is None or not self._release(error):
            return False
        with self._state:
            # The scheduler preempts no sequence of a plan whose rows are then run apart.
            again = self._scheduler.shrink(time.monotonic(), tried=self._retried)
            now = self._scheduler.step_tokens
        self._retried = True
        logger.warning(
            "the device has no memory for a step; steps are of %d tokens now, and %s",
            now,
            "this one is planned again" if again else "the sequences of this one run alone",
        )
        return again

    def failed_alone(self, request_id: str, error: BaseException) -> bool:
        """React to a sequence that failed alone. Returns True if it is not to blame: another request also failed alone
        for lack of memory, and no step has succeeded since. Then another process has taken the memory."""
        if self._release is None or not self._release(error):
            return False
        self._starved.add(request_id)
        return len(self._starved) > 1

    def went_well(self) -> None:
        """Note that a step succeeded."""
        self._retried = False
        self.had_memory()

    def had_memory(self) -> None:
        """Note that a part of a step succeeded."""
        self._starved.clear()
