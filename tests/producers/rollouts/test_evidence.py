"""What the wealth of bets is worth: against simulation, and against what Ville's inequality allows."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from producers.rollouts.evidence import FIRST_STEP, FRACTIONS, GRID, bounds, log_wealth, mean


def test_the_wealth_is_that_of_bets_made_one_after_another_in_any_order() -> None:
    draw, margin = random.Random(1), 0.02
    differences = [draw.randint(-GRID, GRID) for _ in range(60)]
    wealth = [1.0] * len(FRACTIONS)
    for difference in differences:
        wealth = [
            money * (1 + part * (difference / GRID - margin) / (1 + margin))
            for money, part in zip(wealth, FRACTIONS, strict=True)
        ]
    mixed = sum(money * weight for money, weight in zip(wealth, FRACTIONS.values(), strict=True))
    expected = FIRST_STEP * mixed + (1 - FIRST_STEP)  # three more steps have not begun
    assert log_wealth([Counter(differences)], 4, margin) == pytest.approx(math.log(expected))


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_difference_at_the_margin_reaches_the_limit_no_more_often_than_allowed(share: float) -> None:
    """Looked at after every comparison. `share`: of a difference of 1; else it is 0: its mean is the margin."""
    alpha, runs, reached = 0.1, 200, 0
    for seed in range(runs):
        draw, counts = random.Random(seed), Counter[int]()
        for _ in range(150):
            counts[GRID if draw.random() < share else 0] += 1
            if log_wealth([counts], 1, share) >= math.log(1 / alpha):
                reached += 1
                break
    assert reached <= alpha * runs


def test_bounds_hold_the_mean_and_say_what_the_test_says() -> None:
    draw = random.Random(2)
    steps = [Counter(round(draw.uniform(-0.5, 1) * GRID) for _ in range(200)) for _ in range(2)]
    lower, middle, upper = bounds(steps, 3, 0.01)
    assert lower < middle == mean(steps) < upper
    assert log_wealth(steps, 3, lower - 1e-4) > math.log(100) > log_wealth(steps, 3, lower + 1e-4)
    assert bounds([], 3, 0.01) == (-1.0, 0.0, 1.0)
