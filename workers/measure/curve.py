"""Seconds of a step by its size, smoothed, for a few sizes that span a wide range."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

#: One bucket for each power of two: sizes 1, 2-3, 4-7, ...
BUCKETS: Final = 21
#: Steps after which a bucket is believed.
TRUSTED: Final = 32
#: Steps over which a bucket is smoothed.
MEMORY: Final = 128
#: A step counts as at most so many times the mean of its bucket: what took longer was the machine's doing.
OUTLIER: Final = 4.0
#: The slope beyond the largest size is that of the sizes from this share of it on.
NEAR: Final = 1 / 8


class Curve:
    """Written by one thread; others read it, a step early or late."""

    def __init__(self) -> None:
        self._sizes = [0.0] * BUCKETS
        self._seconds = [0.0] * BUCKETS
        self._count = [0] * BUCKETS

    def take(self, size: int, seconds: float) -> float:
        """Enter one step. Returns the seconds that it counts as."""
        bucket = min(size.bit_length(), BUCKETS) - 1
        count = self._count[bucket]
        mean = self._seconds[bucket]
        if count and seconds > OUTLIER * mean:
            seconds = OUTLIER * mean
        elif count < TRUSTED and OUTLIER * seconds < mean:
            count = 0  # those before were the outliers
        share = 1.0 / (count + 1) if count < MEMORY else 1.0 / MEMORY
        self._seconds[bucket] = mean + share * (seconds - mean)
        self._sizes[bucket] += share * (size - self._sizes[bucket])
        self._count[bucket] = count + 1
        return seconds

    def near(self, size: int) -> float | None:
        """The mean of the size's bucket; None as long as that is not believed. Quick, for every step."""
        bucket = min(size.bit_length(), BUCKETS) - 1
        return self._seconds[bucket] if self._count[bucket] >= TRUSTED else None

    def points(self) -> list[tuple[float, float]]:
        """(size, seconds) of the believed buckets. Seconds do not fall with size: buckets that say so share their mean,
        each by its number of steps, as far as these are remembered."""
        sizes: list[float] = []
        runs: list[tuple[float, int, int]] = []
        for size, seconds, count in zip(self._sizes, self._seconds, self._count, strict=True):
            if count < TRUSTED:
                continue
            sizes.append(size)
            run = (seconds, min(count, MEMORY), 1)
            while runs and runs[-1][0] > run[0]:
                run = _joined(runs.pop(), run)
            runs.append(run)
        level = [seconds for seconds, _, buckets in runs for _ in range(buckets)]
        return list(zip(sizes, level, strict=True))


def _joined(one: tuple[float, int, int], other: tuple[float, int, int]) -> tuple[float, int, int]:
    """Two neighbouring runs of buckets as one: (mean seconds, steps, buckets)."""
    steps = one[1] + other[1]
    return (one[0] * one[1] + other[0] * other[1]) / steps, steps, one[2] + other[2]


def at(points: list[tuple[float, float]], size: float) -> float:
    """Seconds of a step of this size: between points by interpolation, beyond the last by its slope."""
    place = bisect_left(points, (size, 0.0))
    if place == len(points):
        last, seconds = points[-1]
        return seconds + slope(points) * (size - last)
    if place == 0:
        return points[0][1]
    (before, least), (after, most) = points[place - 1], points[place]
    return least + (most - least) * (size - before) / (after - before)


def slope(points: list[tuple[float, float]]) -> float:
    """Seconds per size at the end of the curve: a line through the last points, each as exact as it is large. Not
    negative; 0 where there is one point."""
    last = points[-1][0]
    near = [(size, seconds, 1 / seconds**2) for size, seconds in points if size >= NEAR * last and seconds > 0]
    total = sum(weight for _, _, weight in near)
    if len(near) < 2:
        return 0.0
    middle = sum(size * weight for size, _, weight in near) / total
    level = sum(seconds * weight for _, seconds, weight in near) / total
    spread = sum(weight * (size - middle) ** 2 for size, _, weight in near)
    return max(0.0, sum(weight * (size - middle) * (seconds - level) for size, seconds, weight in near) / spread)
