"""What the first token of the best tier waits for under overload, in virtual time: the same at every run."""

from __future__ import annotations

import statistics

from tests.bench.overload_by_arithmetic import Run, World, p95


def measured(max_non_priority_step_tokens: int | None = None, exclusive: bool = False) -> tuple[float, float, int]:
    """Mean and p95 of the best tier's TTFT (s), and tokens of tasks that ended in time, in some three minutes of three
    times the capacity. A step of 10 ms and 3 ms a token: a model of 135 million parameters on one core."""
    world = World(
        0.01,
        0.003,
        8,
        128,
        prompt=64,
        output=128,
        max_non_priority_step_tokens=max_non_priority_step_tokens,
        exclusive=exclusive,
    )
    run = Run(world, "a seed", task_s=7.0)
    run.open_loop(rate=3.4, seconds=170.0)
    return statistics.mean(run.ttfts()), p95(run.ttfts()), run.good()


def test_with_short_and_exclusive_steps_the_first_token_comes_sooner_at_no_cost_to_goodput() -> None:
    mean, worst, good = measured()
    hurried_mean, hurried_worst, as_good = measured(16, exclusive=True)
    assert hurried_mean < 0.9 * mean
    assert hurried_worst < 0.95 * worst
    assert as_good > 0.95 * good
