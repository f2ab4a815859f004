"""What something takes by its size, as it was seen lately; nothing is assumed of the machine."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

#: Times of one size that are kept. Believed is the one that a third of them are below: what holds steps up only makes
#: them longer, and of a size that was seen a few times the best is to be hoped.
_KEPT = 15
#: Times of one size before they are believed: the first has what is only done once.
_TRUSTED = 2
#: Times taken after which a size that was not seen again is forgotten, and tried again.
_STALE = 1000
#: How many times the believed one a time counts at most in their mean: more was no step's fault.
_LONGEST = 10.0
#: Up to so many tokens each size is told apart; beyond, by an eighth of a doubling.
_EXACT = 16
#: Known sizes as near as this to each other, by their ratio, say what is between them.
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
    """Seconds by size: what is known and, between and beyond, what is to be hoped."""

    sizes: list[int]
    seconds: list[float]

    def of(self, size: int) -> float:
        """A size that was not seen is hoped to take what lies between the one below and the line to the one above;
        beyond the last, each token half of what it took up to there. 0.0 where nothing is known."""
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
        """Seconds for one more at the end: along a stretch long enough that what is measured is no chance."""
        end = self.sizes[-1]
        start = max(0, min(bisect_left(self.sizes, 0.8 * end), len(self.sizes) - 2))
        if self.sizes[start] == end:
            return 0.0
        return (self.seconds[-1] - self.seconds[start]) / (end - self.sizes[start])


class Times:
    """Used by one thread."""

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
        """Seconds, with what held things up: what they cost in the end. 0.0 where it is not known."""
        found = self._recent.get(_key(size))
        if found is None or not self._known(found):
            return 0.0
        return sum(min(one, _LONGEST * found.believed) for one in found.seconds) / len(found.seconds)

    def curve(self, least: int, most: int) -> Curve:
        """For sizes from `least` to `most`, from those that are known and the nearest on both sides. One that was
        measured as less than a smaller one is taken together with it: more is never done in less."""
        first, last = _key(least), _key(most)
        known = sorted(key for key, one in self._recent.items() if self._known(one))
        known = known[max(0, bisect_left(known, first) - 1) : bisect_left(known, last) + 1]
        # Of each level: (seconds, weight, sizes).
        levels: list[tuple[float, int, list[int]]] = []
        for key in known:
            one = self._recent[key]
            # The size that is asked for is known as exactly as any of its kind.
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
