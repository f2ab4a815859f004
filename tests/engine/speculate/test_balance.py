"""What guessing may lose."""

from __future__ import annotations

import random

import pytest

from engine.speculate.balance import Balance


@pytest.mark.parametrize("cost", [0.01, 0.5, 1.9, 50.0])
def test_drafts_that_bring_nothing_cost_a_small_part_of_the_steps_in_the_long_run(cost: float) -> None:
    balance, lost = Balance(), 0.0
    for _ in range(10_000):
        balance.passed()
        if balance.allows:
            balance.entered(cost, 0.0)
            lost += min(cost, 2.0)
    # What may be lost at first, what was paid in, and the last step's.
    assert lost <= 3 + 0.01 * 10_000 + 2


def test_drafts_that_gain_go_on_though_single_steps_are_slow() -> None:
    """As where others use the processor too: a third of the steps take twice the time."""
    balance, source, allowed = Balance(), random.Random(1), 0
    for _ in range(5000):
        balance.passed()
        if balance.allows:
            allowed += 1
            balance.entered(2.4 if source.random() < 1 / 3 else 0.2, 1.5)
    assert allowed > 4900


def test_what_was_gained_long_ago_is_no_reason_to_go_on_losing() -> None:
    balance = Balance()
    for _ in range(1000):
        balance.passed()
        balance.entered(0.0, 2.0)
    steps = 0
    while balance.allows:
        balance.passed()
        balance.entered(1.0, 0.0)
        steps += 1
    assert steps <= 9
    waited = 0
    while not balance.allows:
        balance.passed()
        waited += 1
    assert 20 < waited < 200
