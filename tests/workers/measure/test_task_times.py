"""Times of tasks by their sizes, as they are forecast from those before."""

from __future__ import annotations

import random

import pytest

from workers.task_times import MIN_TASKS, TaskTimesMeter, quantiles


def drawn(draw: random.Random, meter: TaskTimesMeter, count: int, slower: float = 1.0, noise: float = 0.0) -> None:
    """A token of the output takes 10 ms, one of the prompt 0.5 ms."""
    for _ in range(count):
        prompt, allowed = draw.randint(10, 500), draw.randint(5, 200)
        output = allowed if draw.random() < 0.5 else allowed // 2
        seconds = slower * (0.01 * output + 0.0005 * prompt) * draw.uniform(1 - noise, 1 + noise)
        meter.take(seconds, need=prompt + allowed, prompt=prompt, output=output, allowed=allowed, width=1, running=8)


def test_a_line_through_prompts_and_outputs_and_shares_of_outputs() -> None:
    meter, draw = TaskTimesMeter(), random.Random(3)
    drawn(draw, meter, MIN_TASKS - 1)
    assert meter.times() is None, "too few to tell"
    drawn(draw, meter, 300)
    times = meter.times()
    assert times is not None
    assert times.per_output_token == pytest.approx(0.01, rel=1e-3)
    assert times.per_prompt_token == pytest.approx(0.0005, rel=1e-2)
    assert times.error < 0.01, "the line is exact"
    assert 0.05 < times.need_error < 0.5, "by its need alone a task is not known as well"
    assert times.shares[-1] == 1.0
    assert times.shares[2] == pytest.approx(0.5, abs=0.05)
    assert times.task / times.per_need == pytest.approx(357, rel=0.3), "the mean need"


def test_what_has_become_slower_is_soon_known_and_noise_is_told() -> None:
    meter, draw = TaskTimesMeter(), random.Random(4)
    drawn(draw, meter, 300)
    drawn(draw, meter, 300, slower=3.0, noise=0.5)
    times = meter.times()
    assert times is not None
    assert times.per_output_token == pytest.approx(0.03, rel=0.3)
    assert 0.15 < times.error < 0.6


def test_tasks_that_generate_nothing_have_no_shares() -> None:
    meter = TaskTimesMeter()
    for prompt in range(100, 100 + MIN_TASKS):
        meter.take(0.001 * prompt, need=prompt, prompt=prompt, output=0, allowed=0, width=1, running=1)
    times = meter.times()
    assert times is not None
    assert times.per_output_token == 0
    assert times.per_prompt_token == pytest.approx(0.001)
    assert not times.shares


def test_quantiles_lie_between_neighbours() -> None:
    assert quantiles(()) == ()
    assert quantiles((0.5,)) == (0.5,) * 11
    assert quantiles((1.0, 0.0)) == tuple(k / 10 for k in range(11))
