"""Drafts are as long as gives the most tokens a second, by the times that were seen."""

from __future__ import annotations

import pytest

from engine.sequence import Sequence
from engine.speculate.policy import Policy, Times
from tests.engine.sampling.sequences import sequence


def guessed(shares: list[float]) -> list[Sequence]:
    """Sequences of whose drafts these parts were right lately."""
    seqs = [sequence(slot) for slot in range(len(shares))]
    for seq, share in zip(seqs, shares, strict=True):
        seq.guessed.share = share
    return seqs


def chosen(policy: Policy, seqs: list[Sequence]) -> list[int]:
    """The lengths of sequences that the proposer is up to date with."""
    for seq in seqs:
        seq.guessed.latest = policy._turn
    lengths = policy.choose(len(seqs), seqs)
    return [lengths.get(seq.serial, 0) for seq in seqs]


def settled(policy: Policy, shares: list[float], step: dict[int, float], one_pass: float = 0.0) -> list[int]:
    """The lengths after many steps of a machine on which a step of so many tokens takes so long."""
    seqs, lengths = guessed(shares), [0] * len(shares)
    for _ in range(120):
        lengths = chosen(policy, seqs)
        tokens = len(shares) + sum(lengths)
        policy.steps.take(tokens, step[tokens])
        if any(lengths):
            policy.passes.take(sum(map(bool, lengths)), one_pass)
    return lengths


def linear(fixed: float, each: float) -> dict[int, float]:
    return {tokens: fixed + each * tokens for tokens in range(1, 600)}


@pytest.mark.parametrize(
    ("share", "step", "one_pass", "expected"),
    [
        (0.9, linear(1.0, 0.0), 0.0, 5),  # more tokens cost nothing
        (0.5, linear(1.0, 0.3), 0.0, 1),
        (0.1, linear(1.0, 0.3), 0.0, 0),  # seldom right
        (1.0, linear(0.0, 1.0), 0.0, 0),  # as many steps would take as long
        (0.9, linear(1.0, 0.0), 1.0, 0),  # guessing takes as long as computing
        (0.8, linear(1.0, 0.05), 0.2, 3),
        # Four rows take no longer than reading the weights; six take as long as they compute.
        (0.8, {1: 1.0, 2: 1.0, 3: 1.02, 4: 1.05, 5: 1.6, 6: 1.9}, 0.05, 3),
        (0.8, {1: 1.0, 2: 1.0, 3: 1.02, 4: 1.05, 5: 1.1, 6: 1.15}, 0.05, 5),
        (0.8, {1: 1.0, 2: 1.6, 3: 1.6, 4: 1.6, 5: 2.4, 6: 2.5}, 0.0, 3),  # by tiles of three
    ],
)
def test_the_length_that_gives_the_most(share: float, step: dict[int, float], one_pass: float, expected: int) -> None:
    policy = Policy(5)
    for size in (1, 2, 3, 4, 5, 6) * 2:
        policy.steps.take(size, step[size])
    (found,) = settled(policy, [share], step, one_pass)
    rates = [sum(share**i for i in range(k + 1)) / (step[1 + k] + k * one_pass) for k in range(6)]
    assert found == expected == max(range(6), key=lambda k: round(rates[k], 9))


def test_large_batches_go_without() -> None:
    step = {tokens: max(1.0, tokens / 8) for tokens in range(1, 600)}
    assert settled(Policy(5), [0.8], step) == [5]
    assert settled(Policy(5), [0.8] * 32, step) == [0] * 32


def test_if_only_some_drafts_fit_the_sequences_with_the_best_acceptance_get_them() -> None:
    """Up to eight tokens a step takes no longer."""
    step = {tokens: 1.0 if tokens <= 8 else tokens / 4 for tokens in range(1, 600)}
    assert settled(Policy(3), [0.5, 0.9, 0.6, 0.1], step) == [0, 3, 1, 0]


def test_sequences_that_are_guessed_badly_get_shorter_drafts_than_others() -> None:
    assert settled(Policy(4), [0.95, 0.95, 0.95, 0.2, 0.0], linear(1.0, 0.08)) == [4, 4, 4, 0, 0]


def test_steps_at_most_double_beyond_the_largest_that_was_seen() -> None:
    policy, seqs, sizes = Policy(5), guessed([0.95] * 16), []
    for _ in range(60):
        sizes.append(16 + sum(chosen(policy, seqs)))
        policy.steps.take(sizes[-1], 1.0)
    assert sizes[:3] == [16, 16, 32]
    assert sizes[-1] == 96
    assert all(size <= 2 * max(sizes[: i + 1]) for i, size in enumerate(sizes[1:]))


def test_what_was_seen_of_other_batches_holds_for_all() -> None:
    policy = Policy(5)
    step = linear(1.0, 0.3)
    settled(policy, [0.6] * 4, step)
    policy.steps.take(1, step[1])
    policy.steps.take(1, step[1])
    # The time of six tokens tells that they do not pay, without a try.
    assert chosen(policy, guessed([0.6])) in ([1], [2])


def test_shares_follow_the_latest_drafts() -> None:
    policy, (seq,) = Policy(4), guessed([0.7])
    # Of four with two right, one is wrong and one does not count.
    for accepted, times, low, high in ((4, 50, 0.97, 1), (0, 10, 0.4, 0.6), (2, 99, 0.61, 0.72)):
        for _ in range(times):
            policy.entered(seq, 4, accepted)
        assert low < policy._share(seq) < high
    # Another sequence begins with that.
    other = sequence(1)
    assert policy._share(other) == pytest.approx(policy._share(seq), abs=0.01)
    policy.entered(other, 4, 0)
    assert policy._share(other) < policy._share(seq)


def taken(*pairs: tuple[int, float], often: int = 2) -> Times:
    times = Times()
    for size, seconds in pairs:
        for _ in range(often):
            times.take(size, seconds)
    return times


def test_steps_that_were_held_up_change_nothing() -> None:
    times = taken((4, 1.0), often=3)
    for _ in range(2):
        times.take(4, 3.0)
    assert times.of([4]) == [1.0]


def test_a_machine_that_has_become_another_is_believed_soon() -> None:
    times = taken((1, 1.0), often=500)
    for _ in range(17):
        times.take(1, 2.0)
    assert times.of([1]) == [2.0]


def test_the_first_time_of_a_size_may_be_that_of_what_is_done_once() -> None:
    times = taken((3, 9.0), often=1)
    assert not times.is_known(3)
    times.take(3, 1.0)
    assert times.is_known(3)
    assert times.of([3]) == [1.0]


def test_old_times_are_forgotten() -> None:
    """Else drafts would be compared for ever with plain steps of a machine that was busy then."""
    times = taken((3, 1.0))
    for _ in range(1000):
        times.take(1, 0.5)
    assert times.is_known(3)
    times.take(1, 0.5)
    assert not times.is_known(3)
    assert list(times.of([1, 3])) == [0.5, 0.5]
    times.take(3, 9.0)
    times.take(3, 8.0)
    assert times.of([3]) == [8.0]


def test_between_known_sizes_times_lie_on_a_line() -> None:
    times = taken((2, 1.0), (6, 3.0))
    assert list(times.of([1, 2, 3, 5, 6, 9])) == [0.5, 1.0, 1.5, 2.5, 3.0, 3.0]
    assert list(Times().of([3])) == [0.0]


def test_large_sizes_are_known_by_their_like() -> None:
    times = taken((100, 5.0))
    assert times.is_known(101)
    assert not times.is_known(120)
    assert times.of([100]) == [5.0]
