"""Tasks as this worker saw them: their size, and the time to their first token."""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final

from workers.measure.steps import Mix

#: Tasks over which their size is averaged.
MEMORY: Final = 200
#: First tokens of the last so many seconds count, and at most so many of them.
WINDOW_S: Final = 180.0
WINDOW: Final = 512


class TaskSizes:
    """Means over the last tasks that ended."""

    def __init__(self) -> None:
        self.ended = 0
        self._mix = Mix(0.0, 0.0, 0.0)

    @property
    def mix(self) -> Mix | None:
        """None before a task has ended."""
        return self._mix if self.ended else None

    def take(self, prompt: int, cached: int, generated: int) -> None:
        """Enter a task that ended. `cached`: prompt tokens that were not computed."""
        self.ended += 1
        share, was = 1 / min(self.ended, MEMORY), self._mix
        self._mix = Mix(
            was.prompt + share * (prompt - cached - was.prompt),
            was.generated + share * (generated - was.generated),
            was.kept + share * (prompt + generated - was.kept),
        )


class FirstTokens:
    """Times (s) to the first token, from the claim."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def take(self, now: float, seconds: float) -> None:
        """`now`: monotonic."""
        self._recent.append((now, seconds))

    def p95(self, now: float) -> float | None:
        """The 95th percentile (nearest rank); None where there were none."""
        times = sorted(seconds for at, seconds in tuple(self._recent) if at >= now - WINDOW_S)
        return times[ceil(0.95 * len(times)) - 1] if times else None
