"""Drafts are as long as gives the most tokens a second, by the times that were seen."""

from __future__ import annotations

import pytest

from engine.speculate import Guessed, Pace
from engine.speculate.pace import Times


def settled(pace: Pace, shares: list[float], step: dict[int, float], one_pass: float = 0.0) -> int:
    """The length after many steps of a machine on which a step of so many tokens takes so long."""
    length = 0
    for _ in range(60):
        length = pace.choose(shares).most
        tokens = len(shares) * (1 + length)
        pace.steps.take(tokens, step[tokens])
        if length:
            pace.passes.take(len(shares), one_pass)
    return length


def linear(fixed: float, each: float) -> dict[int, float]:
    return {tokens: fixed + each * tokens for tokens in range(1, 600)}


def test_first_it_is_measured_what_a_step_takes_without() -> None:
    pace = Pace(4)
    for _ in range(2):
        assert pace.choose([0.9]).most == 0
        pace.steps.take(1, 1.0)
    assert pace.choose([0.9]).most == 4


@pytest.mark.parametrize(
    ("share", "step", "one_pass", "expected"),
    [
        (0.9, linear(1.0, 0.0), 0.0, 5),  # more tokens cost nothing
        (0.5, linear(1.0, 0.3), 0.0, 1),
        (0.1, linear(1.0, 0.3), 0.0, 0),  # seldom right
        (1.0, linear(0.0, 1.0), 0.0, 0),  # as many steps would take as long
        (0.9, linear(1.0, 0.0), 1.0, 0),  # guessing takes as long as computing
        (0.8, linear(1.0, 0.05), 0.2, 3),
    ],
)
def test_the_length_that_gives_the_most(share: float, step: dict[int, float], one_pass: float, expected: int) -> None:
    pace = Pace(5)
    found = settled(pace, [share], step, one_pass)
    rates = [sum(share**i for i in range(k + 1)) / (step[1 + k] + k * one_pass) for k in range(6)]
    assert found == expected == max(range(6), key=lambda k: round(rates[k], 9))


def test_large_batches_go_without() -> None:
    step = {tokens: max(1.0, tokens / 8) for tokens in range(1, 600)}
    assert settled(Pace(5), [0.8], step) == 5
    assert settled(Pace(5), [0.8] * 32, step) == 0


def test_nothing_is_tried_where_no_draft_would_pay() -> None:
    pace = Pace(3)
    settled(pace, [0.5] * 8, linear(0.0, 1.0))
    assert pace.choose([0.5] * 8).hopeless
    settled(pace, [0.0] * 2, linear(1.0, 0.0))
    assert not pace.choose([0.0] * 2).hopeless


def test_sequences_that_are_guessed_badly_get_shorter_drafts_than_others() -> None:
    pace = Pace(4)
    shares = [0.95, 0.95, 0.95, 0.2]
    settled(pace, shares, linear(1.0, 0.08))
    depth = pace.choose(shares)
    assert depth.of(0.95) == depth.most > depth.of(0.2)
    assert depth.of(0.0) == 0
    assert depth.of(1.0) == depth.most


def test_a_step_that_was_held_up_changes_little() -> None:
    times = Times()
    for seconds in (1.0, 1.0, 50.0):
        times.take(4, seconds)
    assert times.of(4) == pytest.approx(1.2)


def test_the_first_time_of_a_size_may_be_that_of_what_is_done_once() -> None:
    times = Times()
    times.take(3, 9.0)
    assert (times.known(3), times.of(3)) == (False, 0.0)
    times.take(3, 1.0)
    assert (times.known(3), times.of(3)) == (True, 1.0)
    # A larger one is hoped to take no longer until it is known.
    assert times.of(7) == 1.0


def test_old_times_are_forgotten() -> None:
    times = Times()
    for _ in range(2):
        times.take(3, 1.0)
    for _ in range(1001):
        times.take(1, 0.5)
    assert not times.known(3)
    assert times.of(3) == 0.5


def test_shares_follow_the_latest_drafts() -> None:
    guessed = Guessed()
    assert guessed.share(0.7, 2.0) == pytest.approx(0.7)
    for _ in range(50):
        guessed.take(4, 4)
    assert guessed.share(0.7, 2.0) > 0.97
    for _ in range(10):
        guessed.take(4, 0)
    assert guessed.share(0.7, 2.0) < 0.75
    for _ in range(30):
        guessed.take(4, 2)  # two right, one wrong, one not tried
    assert guessed.share(0.7, 2.0) == pytest.approx(2 / 3, abs=0.02)
