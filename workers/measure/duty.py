"""Duty cycle: the share of the last seconds in which the engine had work."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import itemgetter
from typing import Final

#: The seconds that the duty cycle is about.
WINDOW_S: Final = 10.0
#: Steps are noted at most so often (s).
NOTED_S: Final = 0.25


class Duty:
    """One thread writes, others read. Times are monotonic."""

    def __init__(self, now: float) -> None:
        self._busy = 0.0
        self._began = now
        #: (time, seconds of all steps until then).
        self._notes: deque[tuple[float, float]] = deque([(now, 0.0)], maxlen=int(4 * WINDOW_S / NOTED_S))

    def take(self, ended: float, seconds: float) -> None:
        """Enter one step."""
        before, self._busy = self._busy, self._busy + seconds
        if ended - self._notes[-1][0] >= NOTED_S:
            if seconds >= NOTED_S:
                self._notes.append((max(ended - seconds, self._notes[-1][0]), before))
            self._notes.append((ended, self._busy))

    def share(self, now: float, stepping: float = 0.0) -> float:
        """Of the window that ends now. `stepping`: seconds that a step has run, which has not ended."""
        since = max(self._began, now - WINDOW_S)
        busy = self._busy - self._until(since) + min(stepping, now - since)
        return min(1.0, max(0.0, busy / (now - since))) if now > since else 0.0

    def _until(self, then: float) -> float:
        """Seconds of all steps until then."""
        notes = tuple(self._notes)
        place = bisect_left(notes, then, key=itemgetter(0))
        if place == len(notes):
            return self._busy if then - notes[-1][0] >= NOTED_S else notes[-1][1]
        if place == 0:
            return notes[0][1]
        (early, less), (late, more) = notes[place - 1], notes[place]
        return less + (more - less) * (then - early) / (late - early)
