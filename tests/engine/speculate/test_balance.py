"""What guessing may lose."""

from __future__ import annotations

import random

import pytest

from engine.speculate.balance import Balance


@pytest.mark.parametrize("cost", [0.01, 0.5, 1.9])
def test_drafts_that_bring_nothing_cost_a_small_part_of_the_steps_in_the_long_run(cost: float) -> None:
    balance, passed, lost = Balance(), 0.0, 0.0
    for _ in range(10_000):
        took = 1.0
        if balance.allows:
            balance.entered(cost, 0.0)
            took += cost
            lost += cost
        balance.passed(took)
        passed += took
    # What may be lost at first, what was paid in, and the last step's.
    assert 0.005 * passed < lost <= 2 + 0.01 * passed + 2


def test_a_step_that_was_held_up_is_not_held_against_drafts() -> None:
    balance = Balance()
    balance.entered(50.0, 0.0)
    waited = 0
    while not balance.allows:
        balance.passed(1.0)
        waited += 1
    assert waited <= 250


def test_drafts_that_gain_go_on_though_single_steps_are_slow() -> None:
    """As where others use the processor too: a third of the steps take twice the time."""
    balance, source, allowed = Balance(), random.Random(1), 0
    for _ in range(5000):
        balance.passed(1.0)
        if balance.allows:
            allowed += 1
            balance.entered(2.4 if source.random() < 1 / 3 else 0.2, 1.5)
    assert allowed > 4900


def test_what_was_gained_long_ago_is_no_reason_to_go_on_losing() -> None:
    balance = Balance()
    for _ in range(1000):
        balance.passed(1.0)
        balance.entered(0.0, 2.0)
    steps = 0
    while balance.allows:
        balance.passed(1.0)
        balance.entered(1.0, 0.0)
        steps += 1
    assert steps <= 9
    waited = 0
    while not balance.allows:
        balance.passed(1.0)
        waited += 1
    assert 20 < waited < 200


def test_to_begin_is_paid_from_an_account_of_its_own_which_gains_fill() -> None:
    balance = Balance()
    assert balance.rich
    balance.begun(1, 30.0)
    # Those who have drafts keep them.
    assert (balance.allows, balance.begins, balance.rich) == (True, 0, False)
    for _ in range(29):
        assert not balance.begins
        balance.entered(0.5, 1.5)
    assert balance.begins


@pytest.mark.parametrize("cost", [0.2, 5.0, 80.0])
def test_beginning_in_vain_costs_a_small_part_of_the_time(cost: float) -> None:
    balance, passed, lost = Balance(), 0.0, 0.0
    while passed < 50_000:
        took = 1.0
        if balance.begins:
            balance.begun(1, cost)
            took += cost
            lost += cost
        balance.passed(took)
        passed += took
    assert 0.005 * passed < lost <= 2 + 0.01 * passed + cost


def test_a_prompt_s_time_pays_in_as_much_as_that_of_steps() -> None:
    one, other = Balance(), Balance()
    for balance in (one, other):
        balance.begun(1, 4.5)
    one.passed(90.0)
    for _ in range(90):
        other.passed(1.0)
    assert one.begins == other.begins == 0
    for balance in (one, other):
        for _ in range(170):
            balance.passed(1.0)
        assert balance.begins


def test_what_was_lost_is_made_good_before_those_are_tried_of_whom_nothing_is_known() -> None:
    balance = Balance()
    balance.begun(1, 1.6)
    assert (balance.begins, balance.rich) == (1, False)
    balance.passed(60.0)
    assert balance.rich


def test_as_many_are_begun_with_at_a_time_as_there_is_cover_for() -> None:
    balance = Balance()
    assert balance.begins == 1
    balance.begun(1, 0.1)
    assert balance.begins == 18
    balance.begun(18, 18 * 0.2)
    assert balance.begins == 0
    balance.passed(100.0)
    balance.passed(100.0)
    assert balance.begins == 1
    looking = Balance()
    looking.begun(1, 0.0)
    assert looking.begins > 1000


def test_after_all_was_lost_a_try_s_cost_is_paid_in_first() -> None:
    balance = Balance()
    balance.entered(2.0, 0.0)
    assert balance.allows
    balance.entered(0.1, 0.0)
    assert not balance.allows
    balance.passed(40.0)
    assert not balance.allows
    balance.passed(40.0)
    assert balance.allows
