"""Does a series of samples grow without end? A pure function of the samples.

What a process holds rises while it warms up, jumps about, and comes down late or never: none of that is a leak. A
leak goes on. So: the warm-up is left out; the samples that are left are averaged in blocks, which takes out what
jumps about; through those goes Sen's slope (the median of the slopes between all pairs; Sen 1968), which single jumps
do not move; and it counts only as far as Kendall's test is sure of it (the lower end of Sen's confidence interval),
in both halves of what is left, so that what rises once and stays is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

#: Part of the samples that belongs to the warm-up.
WARM_UP = 0.4
BLOCKS = 24
#: One-sided, of the standard normal distribution: 1% of series without a trend would be called growing.
SURE = 2.33
#: Below so many samples after the warm-up nothing can be said.
FEWEST = 8


@dataclass(frozen=True, slots=True)
class Growth:
    """Of a quantity after the warm-up: from `start` to `end`, `slope` per second, of which `at_least` is certain.

    `allowed`: growth over that time (`seconds`) which is no leak.
    """

    start: float
    end: float
    slope: float
    at_least: float
    seconds: float
    allowed: float
    lasting: bool
    """Both halves rise."""

    @property
    def leaks(self) -> bool:
        return self.lasting and self.at_least * self.seconds > self.allowed

    @property
    def an_hour(self) -> float:
        return self.slope * 3600


def judge(samples: Sequence[tuple[float, float]], allowed: float) -> Growth:
    """`samples`: (seconds, value), in order of time. Raises ValueError where they are too few."""
    kept = samples[round(WARM_UP * len(samples)) :]
    if len(kept) < FEWEST:
        raise ValueError(f"{len(kept)} samples after the warm-up; it takes {FEWEST} to see a trend")
    points = _averaged(kept)
    slope, at_least = _sen(points)
    half = len(points) // 2
    # Of a rise that goes on, each half has its share; of one that ended, the second has none.
    halves = [_sen(part)[0] for part in (points[: half + 1], points[half:])]
    lasting = all(part * (points[-1][0] - points[0][0]) / 2 > allowed / 8 for part in halves)
    quarter = max(1, len(points) // 4)
    start, end = (fmean(value for _, value in part) for part in (points[:quarter], points[-quarter:]))
    return Growth(start, end, slope, at_least, points[-1][0] - points[0][0], allowed, lasting)


def _averaged(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    count = min(BLOCKS, len(samples))
    cuts = [round(k * len(samples) / count) for k in range(count + 1)]
    blocks = [samples[a:b] for a, b in pairwise(cuts)]
    return [(fmean(at for at, _ in block), median(value for _, value in block)) for block in blocks]


def _sen(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Sen's slope, and the lower end of its one-sided confidence interval (Gilbert 1987, 16.4.2)."""
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for k, earlier in enumerate(points)
        for later in points[k + 1 :]
    )
    n = len(points)
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    rank = math.floor((len(slopes) - SURE * deviation) / 2)
    return median(slopes), slopes[max(0, rank)] if rank >= 0 else min(0.0, slopes[0])
