"""Recent durations by size, as measured. Nothing is assumed about the machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

#: The number of durations kept for one size. The estimate is their lower third, because delays only make steps longer.
#: For a size measured a few times, it is the best one.
_KEPT = 15
#: The number of durations of one size before the estimate is used. The first includes one-time work.
_TRUSTED = 2
#: The number of later measurements after which a size not measured again is forgotten.
_STALE = 1000
#: The most that a duration counts in the mean, as a multiple of the estimate. The rest was not the step's fault.
_LONGEST = 10.0
#: Sizes up to this many tokens are separate. Larger sizes are grouped by an eighth of a doubling.
_EXACT = 16
#: The ratio of two known sizes up to which sizes between them are interpolated linearly.
_NEAR = 1.2


@dataclass(slots=True)
class _Recent:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    believed: float = 0.0
    size: int = 0
    taken: int = 0

    def take(self, size: int, seconds: float, now: int) -> None:
        self.seconds.append(seconds)
        self.believed = sorted(self.seconds)[(len(self.seconds) - 1) // 3]
        self.size, self.taken = size, now


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size: measured at known sizes, an optimistic estimate between and beyond them."""

    sizes: list[int]
    seconds: list[float]

    def of(self, size: int) -> float:
        """The seconds of a size; 0.0 if nothing is known.

        Between known sizes that are far apart, only half of the rise is assumed. Beyond the last, each token is assumed
        to take half of the last slope.
        """
        sizes, seconds = self.sizes, self.seconds
        if not sizes:
            return 0.0
        at = bisect_left(sizes, size)
        if at == len(sizes):
            return seconds[-1] + self._rise() * (size - sizes[-1]) / 2
        if sizes[at] == size:
            return seconds[at]
        if at == 0:
            return seconds[0] * size / sizes[0]
        below, above = sizes[at - 1], sizes[at]
        more = (seconds[at] - seconds[at - 1]) * (size - below) / (above - below)
        return seconds[at - 1] + (more if above <= _NEAR * below else more / 2)

    def _rise(self) -> float:
        """The slope at the end, in seconds per token, over a stretch long enough to be reliable."""
        end = self.sizes[-1]
        start = max(0, min(bisect_left(self.sizes, 0.8 * end), len(self.sizes) - 2))
        if self.sizes[start] == end:
            return 0.0
        return (self.seconds[-1] - self.seconds[start]) / (end - self.sizes[start])


class Times:
    """Durations by size. Used by one thread."""

    def __init__(self) -> None:
        self._recent: dict[int, _Recent] = {}
        self._now = 0

    def take(self, size: int, seconds: float) -> None:
        self._now += 1
        found = self._recent.get(_key(size))
        if found is None or self._now - found.taken > _STALE:
            found = self._recent[_key(size)] = _Recent()
        found.take(size, seconds, self._now)

    def known(self, size: int) -> bool:
        found = self._recent.get(_key(size))
        return found is not None and self._known(found)

    def mean(self, size: int) -> float:
        """The mean seconds of a size, delays included. 0.0 if it is not known."""
        found = self._recent.get(_key(size))
        if found is None or not self._known(found):
            return 0.0
        return sum(min(one, _LONGEST * found.believed) for one in found.seconds) / len(found.seconds)

    def curve(self, least: int, most: int) -> Curve:
        """The curve from `least` to `most`, from the known sizes there and the nearest ones on both sides.

        It never falls: a size measured as faster than a smaller one is averaged with it.
        """
        first, last = _key(least), _key(most)
        known = sorted(key for key, one in self._recent.items() if self._known(one))
        known = known[max(0, bisect_left(known, first) - 1) : bisect_left(known, last) + 1]
        # Each level is (seconds, weight, sizes).
        levels: list[tuple[float, int, list[int]]] = []
        for key in known:
            one = self._recent[key]
            # The size asked for stands for its group.
            level = (one.believed, len(one.seconds), [least if key == first else one.size])
            while levels and levels[-1][0] > level[0]:
                seconds, weight, sizes = levels.pop()
                both = weight + level[1]
                level = ((seconds * weight + level[0] * level[1]) / both, both, sizes + level[2])
            levels.append(level)
        return Curve(
            [size for _, _, sizes in levels for size in sizes],
            [seconds for seconds, _, sizes in levels for _ in sizes],
        )

    def _known(self, one: _Recent) -> bool:
        return len(one.seconds) >= _TRUSTED and self._now - one.taken <= _STALE


def _key(size: int) -> int:
    return size if size <= _EXACT else _EXACT + int(8 * math.log2(size / _EXACT))
