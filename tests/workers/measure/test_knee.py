"""The knee, of engines whose knee is known because their steps' times are."""

from __future__ import annotations

from itertools import product

import pytest

from engine.plan import StepWork
from tests.exhaustive import few
from tests.workers.measure.synthetic import BUDGET, Machine, Shape, noisy, steps, true_knee
from workers.measure import Knee, Mix, StepTimes

SEQS = 96
#: Tokens that the KV cache holds where that is not what is tested.
PLENTY = 1e9

#: A CPU: 2 ms for any step, 0.25 ms for each sequence; prompts alone.
CPU = Machine(lambda n: 0.002 + 0.00025 * n if n else 0.0, 0.0002, apart=True)
#: A GPU: memory sets the pace up to 40 sequences, arithmetic from then on.
GPU = Machine(lambda n: max(0.010, 0.00025 * n) if n else 0.004, 0.00002)
#: One whose sequences share nothing.
SERIAL = Machine(lambda n: 0.001 * n, 0.0002)
CHAT, LONG_PROMPTS, LONG_ANSWERS = Shape(128, 128), Shape(1500, 20), Shape(16, 400)
#: Tasks of so few tokens that no step is without a prompt.
SHORT = Shape(300, 6)


def measured(machine: Machine, shape: Shape, sizes: list[int], *, kv_tokens: float = PLENTY) -> Knee | None:
    """The findings of a worker that has seen so many sequences at once, on a busy machine."""
    times = StepTimes()
    for size in sizes:
        for work in noisy(steps(machine, shape, size, 4 * size)):
            times.take(work)
    return times.knee(Mix(shape.prompt, shape.generated, shape.prompt + shape.generated), SEQS, kv_tokens, BUDGET)


@pytest.mark.parametrize(
    ("machine", "shape"),
    few(
        [*product((CPU, GPU, SERIAL), (CHAT, LONG_PROMPTS, LONG_ANSWERS)), (GPU, SHORT)],
        *((CPU, CHAT), (GPU, LONG_ANSWERS), (SERIAL, LONG_PROMPTS), (GPU, SHORT)),
    ),
)
def test_under_full_load_it_is_the_true_one(machine: Machine, shape: Shape) -> None:
    sequences, tokens_per_s = true_knee(machine, shape, SEQS)
    found = measured(machine, shape, [1, 3, 8, 20, 50, SEQS])
    assert found is not None
    assert sequences / 1.5 <= found.concurrency <= sequences * 1.5 or abs(found.concurrency - sequences) <= 1
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.3)


@pytest.mark.parametrize("shape", [CHAT, LONG_ANSWERS], ids=["chat", "long-answers"])
def test_it_is_found_before_load_has_reached_it(shape: Shape) -> None:
    sequences, _ = true_knee(CPU, shape, SEQS)
    found = measured(CPU, shape, [1, 2, 4, 6])
    assert found is not None
    assert sequences / 2 <= found.concurrency <= sequences * 2


def test_low_load_does_not_lower_it() -> None:
    """Steps that get no longer with more sequences say that there is room: the knee lies far above what was seen."""
    found = measured(GPU, LONG_ANSWERS, [1, 5])
    assert found is not None
    assert found.concurrency >= SEQS / 2


def test_nothing_is_told_from_one_or_two_at_once() -> None:
    assert measured(GPU, CHAT, [1, 2]) is None


@pytest.mark.parametrize(
    ("machine", "shape", "seen", "tokens_per_s"),
    [(CPU, Shape(4000, 4), [1] * 4, 1 / CPU.prompt), (GPU, Shape(300, 1), [1, 4], 30_000)],
)
def test_one_at_once_is_enough_where_prompts_take_all_the_time(
    machine: Machine, shape: Shape, seen: list[int], tokens_per_s: float
) -> None:
    """However cheap further sequences' decodes were, throughput would not grow."""
    found = measured(machine, shape, seen)
    assert found is not None
    assert found.concurrency == 1
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.3)


def test_the_kv_cache_bounds_it() -> None:
    found = measured(GPU, LONG_ANSWERS, [1, 3, 8, 20], kv_tokens=10 * 416 + 5)
    assert found is not None
    assert 8 <= found.concurrency <= 10


def test_a_short_burst_is_remembered() -> None:
    """Hours at low load do not make the worker forget what many at once took."""
    sequences, _ = true_knee(CPU, CHAT, SEQS)
    found = measured(CPU, CHAT, [SEQS, 40, 20, 8, *[1] * 200])
    assert found is not None
    assert sequences / 1.5 <= found.concurrency <= sequences * 1.5


def test_accepted_drafts_count() -> None:
    """A decode that makes three tokens makes three times the throughput."""
    found = []
    for made in (1, 3):
        times = StepTimes()
        for size in (1, 2, 4, 8, 16):
            for _ in range(400):
                times.take(StepWork(0.0, 0.002 + 0.0002 * size, size, 0, made * size))
        found.append(times.knee(Mix(0, 300, 300), 16, PLENTY, BUDGET))
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].tokens_per_s == pytest.approx(3 * found[0].tokens_per_s, rel=0.05)


def test_nothing_is_known_before_anything_was_computed() -> None:
    assert StepTimes().knee(Mix(0, 0, 0), 8, 0, BUDGET) is None
    assert StepTimes().knee(Mix(10, 10, 20), 8, 1000, BUDGET) is None
