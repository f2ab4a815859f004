"""Duty cycle, times to the first token, sizes of tasks."""

from __future__ import annotations

import pytest

from workers.measure import FIRST, Duty, FirstTokens, TaskSizes


def test_duty_is_the_share_of_the_last_ten_seconds() -> None:
    duty = Duty(0.0)
    for k in range(1000):  # 40 ms of every 50
        duty.take(0.05 * k + 0.04, 0.04)
    assert duty.share(50.0) == pytest.approx(0.8, abs=0.03)
    assert duty.share(55.0) == pytest.approx(0.4, abs=0.03)
    assert duty.share(61.0) == 0.0


def test_a_long_step_counts_where_it_ran() -> None:
    duty = Duty(0.0)
    duty.take(1.0, 0.01)
    assert duty.share(20.0, stepping=8.0) == pytest.approx(0.8)  # not over yet
    duty.take(21.0, 9.0)
    assert duty.share(21.0) == pytest.approx(0.9)
    assert duty.share(26.0) == pytest.approx(0.5)


def test_a_worker_that_has_just_begun_counts_from_then() -> None:
    duty = Duty(100.0)
    assert duty.share(100.0) == 0.0
    duty.take(101.0, 0.5)
    assert duty.share(101.0) == pytest.approx(0.5)


def test_the_95th_percentile_of_the_last_minutes() -> None:
    first = FirstTokens()
    assert first.p95(0.0) is None
    for k in range(1, 101):
        first.take(1000.0 + k, float(k))
    assert first.p95(1100.0) == 95.0
    assert first.p95(1270.0) == 100.0  # the last ten
    assert first.p95(5000.0) is None
    for _ in range(10 * FIRST):
        first.take(6000.0, 0.5)
    assert first.p95(6000.0) == 0.5


def test_sizes_are_means_of_what_was_computed() -> None:
    sizes = TaskSizes()
    assert sizes.mix is None
    sizes.take(100, 60, 10)
    sizes.take(300, 0, 30)
    mix = sizes.mix
    assert mix is not None
    assert (mix.prompt, mix.generated, mix.kept) == (170.0, 20.0, 220.0)
