"""Whole requests on machines of many kinds: the length that is best is found and kept, and what is lost is little.

By a clock that tests set: a step takes what the machine is said to take.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from tests.engine.speculate.machine import Machine, best
from tests.exhaustive import few

Step = Callable[[int], float]

#: Steps by their tokens, in what a step of one takes.
MACHINES: dict[str, Step] = {
    "reading weights is all": lambda tokens: 1.0 + 0.01 * tokens,
    "computing shows from four tokens on": lambda tokens: max(1.0, 0.45 + 0.14 * tokens),
    "computing shows at once": lambda tokens: max(1.0, 0.6 + 0.2 * tokens),
    "by tiles of four": lambda tokens: 1.0 + 0.35 * ((tokens - 1) // 4),
}


def computing(tokens: int) -> float:
    return 0.1 + 0.9 * tokens


def quiet(source: random.Random) -> float:
    return source.lognormvariate(0.0, 0.03) + (1.0 if source.random() < 0.02 else 0.0)


def busy(source: random.Random) -> float:
    return source.lognormvariate(0.0, 0.2) + (2.0 if source.random() < 0.15 else 0.0)


@pytest.mark.parametrize(
    ("name", "agreement", "held"),
    few(
        product(MACHINES, (0.8, 0.5), (quiet, busy)),
        *zip(MACHINES, (0.8, 0.5, 0.8, 0.5), (quiet, busy, busy, quiet), strict=True),
    ),
)
def test_one_sequence_goes_nearly_as_fast_as_with_the_best_length(
    name: str, agreement: float, held: Callable[[random.Random], float]
) -> None:
    length, most = best(MACHINES[name], 0.1, agreement, 1, 5)
    machine = Machine(MACHINES[name], lambda rows: 0.1, catching_up=0.3, held=held)
    for _ in range(4):
        machine.serve([agreement])
    # From the second request on it begins with what the others have shown.
    later = [machine.serve([agreement]) for _ in range(8)]
    assert sum(later) / 8 > {quiet: 0.93, busy: 0.8}[held] * most
    assert length > 0


def test_the_second_request_begins_right() -> None:
    step = MACHINES["computing shows from four tokens on"]
    machine = Machine(step, lambda rows: 0.05)
    for _ in range(3):
        machine.serve([0.85])
    seen = len(machine.lengths)
    machine.serve([0.85])
    first = [lengths[0] for lengths in machine.lengths[seen : seen + 8]]
    assert best(step, 0.05, 0.85, 1, 5)[0] == 4
    assert all(3 <= length <= 5 for length in first)


READING, TILES = MACHINES["reading weights is all"], MACHINES["by tiles of four"]


@pytest.mark.parametrize(
    ("count", "step", "catching_up"),
    few(
        product((1, 8, 32), (READING, TILES, computing), (0.1, 3.0)),
        *((1, READING, 3.0), (8, TILES, 0.1), (32, computing, 3.0), (1, computing, 0.1)),
    ),
)
def test_guesses_that_are_never_right_cost_little_from_the_first_request_on(
    count: int, step: Step, catching_up: float
) -> None:
    """Also where to begin with a sequence takes as long as three steps."""
    machine = Machine(step, lambda rows: 0.1, catching_up=catching_up, output=256)
    first = machine.serve([0.0] * count)
    later = [machine.serve([0.0] * count) for _ in range(3)]
    assert first > 0.95
    assert sum(later) / 3 > 0.97
    assert min(later) > 0.95


@pytest.mark.parametrize(("count", "agreement"), few(product((1, 8, 32), (0.8, 0.5)), (1, 0.8), (32, 0.5)))
def test_where_computing_is_all_guesses_cost_little_though_they_are_right(count: int, agreement: float) -> None:
    machine = Machine(computing, lambda rows: 0.1, catching_up=0.3)
    assert machine.serve([agreement] * count) > 0.95
    assert sum(machine.serve([agreement] * count) for _ in range(4)) / 4 > 0.97


def test_a_draft_model_that_was_asked_in_vain_is_asked_again_when_it_has_become_good() -> None:
    machine = Machine(MACHINES["reading weights is all"], lambda rows: 0.1, catching_up=0.3)
    for _ in range(5):
        machine.serve([0.0] * 4)
    found = [machine.serve([0.9] * 4) for _ in range(6)]
    assert found[-1] > 1.8


def test_long_prompts_that_are_caught_up_with_are_paid_back_where_guesses_are_right() -> None:
    """To begin with a sequence takes 20 steps: the first request does it all the same, and its gains pay for others."""
    machine = Machine(MACHINES["reading weights is all"], lambda rows: 0.1, catching_up=20.0, output=400)
    machine.serve([0.8])
    assert sum(machine.serve([0.8]) for _ in range(3)) / 3 > 1.6


def test_large_batches_go_without_and_leave_small_ones_what_they_know() -> None:
    def step(tokens: int) -> float:
        return max(1.0, tokens / 6)

    machine = Machine(step, lambda rows: 0.05)
    for _ in range(2):
        machine.serve([0.8])
        machine.serve([0.8] * 32)
    assert machine.serve([0.8] * 32) > 0.96
    seen = len(machine.lengths)
    assert machine.serve([0.8]) > 0.8 * best(step, 0.05, 0.8, 1, 5)[1]
    assert machine.lengths[seen + 3][0] > 0


def test_drafts_begin_when_two_plain_steps_were_measured() -> None:
    machine = Machine(MACHINES["reading weights is all"])
    machine.serve([0.8])
    assert [lengths[0] > 0 for lengths in machine.lengths[:3]] == [False, False, True]


def test_one_sequence_that_is_guessed_well_is_found_though_all_before_it_were_guessed_badly() -> None:
    """As with prompt lookup: one request says little of another."""
    machine = Machine(MACHINES["reading weights is all"], lambda rows: 0.1, output=800)
    for _ in range(3):
        machine.serve([0.0])
    assert machine.serve([0.9]) > 1.8


def test_sequences_that_are_guessed_badly_are_not_tried_at_the_cost_of_others() -> None:
    """Gains of the first one pay for no tries of the others."""
    machine = Machine(MACHINES["reading weights is all"], lambda rows: 0.1, catching_up=0.3, output=800)
    alone = Machine(MACHINES["reading weights is all"], lambda rows: 0.1, catching_up=0.3, output=800)
    for _ in range(2):
        machine.serve([0.9, 0.0, 0.0])
        alone.serve([0.9])
    seen = len(machine.lengths)
    machine.serve([0.9, 0.0, 0.0])
    useless = sum(sum(lengths[1:]) for lengths in machine.lengths[seen:] if len(lengths) == 3)
    assert useless < 0.2 * (len(machine.lengths) - seen)


def test_what_guessing_takes_now_and_then_counts_as_well() -> None:
    """Two passes in five take as long as three steps, and the others nothing."""
    source = random.Random(1)
    machine = Machine(
        MACHINES["reading weights is all"], lambda rows: 3.0 if source.random() < 0.4 else 0.0, most=1, output=2000
    )
    assert machine.serve([0.6] * 4) > 0.95
