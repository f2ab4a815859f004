"""Sequential evidence that a candidate is worse than its baseline: a test by betting, valid at every look.

Each comparison of a candidate's task with tasks of its baseline gives a difference `d` in [-1, 1], in multiples of
1/GRID. The null hypothesis: whatever came before, the expectation of `d` is at most `margin`. Then for each fixed
fraction f the wealth

    product over all d of (1 + f (d - margin) / (1 + margin))

is a nonnegative supermartingale that begins with 1, and so is its average over FRACTIONS, and over steps of which each
begins with wealth 1, whatever the weights. By Ville's inequality it ever reaches 1/alpha with probability at most
alpha, so one may look after every task and stop at will. Nothing is assumed about the distribution, nor that it stays
the same.

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", JRSS B 86 (2024), arXiv 2010.09686,
section 4 (capital processes; here with a fixed grid of bets). Over metrics the error is divided by their number
(Bonferroni). The product does not depend on the order, so the counts of each difference are all that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

#: Differences are multiples of 1/GRID.
GRID: Final = 16
#: Parts of the wealth that are bet, relative to the largest bet that cannot ruin, and their weights. Small ones gain by
#: small differences; the largest one finds what is always bad within few comparisons.
FRACTIONS: Final = {0.03: 0.15, 0.08: 0.15, 0.2: 0.15, 0.45: 0.15, 0.98: 0.4}
#: The weight of the first step, which is to find what is always bad; the others share the rest.
FIRST_STEP: Final = 0.5

#: Differences (in 1/GRID) -> how many comparisons had them.
Counts = Mapping[int, int]


class Bounds(NamedTuple):
    """The mean difference, and bounds that hold at all looks together; the whole range without a comparison."""

    lower: float
    mean: float
    upper: float


def comparisons(steps: Sequence[Counts]) -> int:
    """Comparisons of all steps."""
    return sum(sum(counts.values()) for counts in steps)


def mean(steps: Sequence[Counts]) -> float:
    """The mean difference; 0 without a comparison."""
    total = comparisons(steps)
    return sum(d * count for counts in steps for d, count in counts.items()) / GRID / total if total else 0.0


def log_wealth(steps: Sequence[Counts], of_steps: int, margin: float) -> float:
    """The natural logarithm of the wealth. `of_steps`: all steps that there will be; those that are to begin have 1.

    `margin`: in (-1, 1].
    """
    logs = [_log_of_step(counts, margin) for counts in steps]
    first = FIRST_STEP if of_steps > 1 else 1.0
    weights = [first, *[(1 - first) / max(1, of_steps - 1)] * (of_steps - 1)]
    return _log_mean([*logs, *[0.0] * (of_steps - len(logs))], weights)


def bounds(steps: Sequence[Counts], of_steps: int, alpha: float) -> Bounds:
    """Bounds of the mean difference, each wrong at any look with probability at most `alpha`.

    Where the mean changes from step to step, they are bounds of the largest and of the smallest one. The lower one is
    the largest margin that the wealth refutes: what is tested and what is shown agree.
    """
    mirrored = [{-d: count for d, count in counts.items()} for counts in steps]
    return Bounds(_lower(steps, of_steps, alpha), mean(steps), -_lower(mirrored, of_steps, alpha))


def _lower(steps: Sequence[Counts], of_steps: int, alpha: float) -> float:
    goal = math.log(1 / alpha)
    low, high = -1 + 1e-6, 1.0  # the wealth falls as the margin rises
    if log_wealth(steps, of_steps, low) < goal:
        return -1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if log_wealth(steps, of_steps, middle) >= goal else (low, middle)
    return low


def _log_of_step(counts: Counts, margin: float) -> float:
    return _log_mean(
        [
            sum(count * math.log1p(part * (d / GRID - margin) / (1 + margin)) for d, count in counts.items())
            for part in FRACTIONS
        ],
        [*FRACTIONS.values()],
    )


def _log_mean(logs: Sequence[float], weights: Sequence[float]) -> float:
    """The logarithm of the weighted mean. `weights`: they add up to 1."""
    top = max(logs)
    return top + math.log(sum(weight * math.exp(value - top) for value, weight in zip(logs, weights, strict=True)))
