"""Drafts are as long as gives the most tokens a second, by the times that were seen."""

from __future__ import annotations

import pytest

from engine.sequence import Guessed
from engine.speculate import Pace


def settled(pace: Pace, shares: list[float], step: dict[int, float], one_pass: float = 0.0) -> list[int]:
    """The lengths after many steps of a machine on which a step of so many tokens takes so long."""
    lengths = (0,) * len(shares)
    for _ in range(120):
        lengths = pace.choose(shares).each
        tokens = len(shares) + sum(lengths)
        pace.steps.take(tokens, step[tokens])
        if any(lengths):
            pace.passes.take(sum(map(bool, lengths)), one_pass)
    return list(lengths)


def linear(fixed: float, each: float) -> dict[int, float]:
    return {tokens: fixed + each * tokens for tokens in range(1, 600)}


def test_first_it_is_measured_what_a_step_takes_without() -> None:
    pace = Pace(4)
    for _ in range(2):
        assert pace.choose([0.9]).each == (0,)
        pace.steps.take(1, 1.0)
    assert pace.choose([0.9]).each != (0,)
    assert pace.choose([]).each == ()


@pytest.mark.parametrize(
    ("share", "step", "one_pass", "expected"),
    [
        (0.9, linear(1.0, 0.0), 0.0, 5),  # more tokens cost nothing
        (0.5, linear(1.0, 0.3), 0.0, 1),
        (0.1, linear(1.0, 0.3), 0.0, 0),  # seldom right
        (1.0, linear(0.0, 1.0), 0.0, 0),  # as many steps would take as long
        (0.9, linear(1.0, 0.0), 1.0, 0),  # guessing takes as long as computing
        (0.8, linear(1.0, 0.05), 0.2, 3),
        # What reading weights takes hides four rows, and computing is what six take.
        (0.8, {1: 1.0, 2: 1.0, 3: 1.02, 4: 1.05, 5: 1.6, 6: 1.9}, 0.05, 3),
        (0.8, {1: 1.0, 2: 1.0, 3: 1.02, 4: 1.05, 5: 1.1, 6: 1.15}, 0.05, 5),
        (0.8, {1: 1.0, 2: 1.6, 3: 1.6, 4: 1.6, 5: 2.4, 6: 2.5}, 0.0, 3),  # by tiles of three
    ],
)
def test_the_length_that_gives_the_most(share: float, step: dict[int, float], one_pass: float, expected: int) -> None:
    pace = Pace(5)
    (found,) = settled(pace, [share], step, one_pass)
    rates = [sum(share**i for i in range(k + 1)) / (step[1 + k] + k * one_pass) for k in range(6)]
    assert found == expected == max(range(6), key=lambda k: round(rates[k], 9))


def test_large_batches_go_without() -> None:
    step = {tokens: max(1.0, tokens / 8) for tokens in range(1, 600)}
    assert settled(Pace(5), [0.8], step) == [5]
    assert settled(Pace(5), [0.8] * 32, step) == [0] * 32


def test_if_only_some_drafts_fit_the_sequences_with_the_best_acceptance_get_them() -> None:
    """Up to eight tokens a step takes no longer."""
    step = {tokens: 1.0 if tokens <= 8 else tokens / 4 for tokens in range(1, 600)}
    assert settled(Pace(3), [0.5, 0.9, 0.6, 0.1], step) == [0, 3, 1, 0]


def test_steps_grow_little_by_little_beyond_the_largest_that_was_seen() -> None:
    pace, sizes = Pace(5), []
    for _ in range(60):
        tokens = 16 + sum(pace.choose([0.95] * 16).each)
        sizes.append(tokens)
        pace.steps.take(tokens, 1.0)
    assert sizes[-1] == 96
    assert all(size <= max(sizes[: i + 1]) * 5 / 4 for i, size in enumerate(sizes[1:]))


def test_what_was_seen_of_other_batches_holds_for_all() -> None:
    pace = Pace(5)
    step = linear(1.0, 0.3)
    settled(pace, [0.6] * 4, step)
    pace.steps.take(1, step[1])
    pace.steps.take(1, step[1])
    # By what six tokens took it is known that they do not pay, without trying.
    assert pace.choose([0.6]).each in ((1,), (2,))


def test_nothing_is_tried_where_no_draft_would_pay() -> None:
    pace = Pace(3)
    for tokens in (8, 16, 24, 32) * 2:
        pace.steps.take(tokens, float(tokens))
    assert pace.choose([0.99] * 8).hopeless
    # Others may pay.
    pace.steps.take(2, 1.9)
    pace.steps.take(2, 1.9)
    assert not pace.choose([0.99] * 2).hopeless
    pace = Pace(3)
    settled(pace, [0.0] * 2, linear(1.0, 0.0))
    assert not pace.choose([0.0] * 2).hopeless


def test_sequences_that_are_guessed_badly_get_shorter_drafts_than_others() -> None:
    assert settled(Pace(4), [0.95, 0.95, 0.95, 0.2, 0.0], linear(1.0, 0.08)) == [4, 4, 4, 0, 0]


def test_how_much_longer_drafts_make_a_step_is_said_of_what_was_seen() -> None:
    pace = Pace(4)
    assert pace.longer(2, 3) is None
    settled(pace, [0.9] * 2, linear(1.0, 0.1))
    assert pace.longer(2, 3) == pytest.approx(0.3 / 1.2)
    assert pace.longer(2, 0) == 0.0
    assert pace.longer(40, 3) is None


def test_shares_follow_the_latest_drafts() -> None:
    guessed = Guessed()
    assert guessed.share(0.7, 2.0) == pytest.approx(0.7)
    for _ in range(50):
        guessed.take(4, 4)
    assert guessed.share(0.7, 2.0) > 0.97
    for _ in range(10):
        guessed.take(4, 0)
    assert guessed.share(0.7, 2.0) < 0.87
    for _ in range(60):
        guessed.take(4, 2)  # two right, one wrong, one not tried
    assert guessed.share(0.7, 2.0) == pytest.approx(2 / 3, abs=0.02)
