"""Keeps actions for later and the store's time. The housekeeper's thread runs the actions."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable


class Clock:
    """Thread-safe. From the last `set` on the store's time goes on by the monotonic clock: this machine's own may be
    set in the meantime."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()

    def set(self, server_s: float, at: float) -> None:
        """Sets the store's clock (s) as of a time of the monotonic one."""
        self._ahead = server_s - at

    def server_ms(self) -> int:
        """Returns the store's clock (ms), in which deadlines are."""
        return int((time.monotonic() + self._ahead) * 1000)

    def local(self, server_ms: int) -> float:
        """Converts a time of the store's clock (ms) to this machine's monotonic clock (s)."""
        return server_ms / 1000 - self._ahead

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` on the housekeeper's thread after `delay` seconds; it must not block."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay, next(self._order), action))
            self._changed.notify_all()

    def wake(self) -> None:
        """Ends the housekeeper's wait: one of its deadlines has changed."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, limit: float, soonest: Callable[[], float]) -> list[Callable[[], None]]:
        """Wait for at most `limit` seconds; return the actions that are due by then.

        `soonest`: when the wait is to end (monotonic). What changes it after it was called is followed by `wake`.
        """
        with self._changed:
            first = self._due[0][0] if self._due else float("inf")
            self._changed.wait(max(0.0, min(limit, min(first, soonest()) - time.monotonic())))
            now, ready = time.monotonic(), []
            while self._due and self._due[0][0] <= now:
                ready.append(heapq.heappop(self._due)[2])
            return ready
