"""Times of what takes longer the larger it is: what was seen, and what is to be hoped of the rest."""

from __future__ import annotations

import pytest

from engine.speculate.times import Curve, Times


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
    assert times.curve(4, 4).of(4) == 1.0
    # On average they do take so long; a stall is nobody's.
    assert times.mean(4) == pytest.approx((3 + 6) / 5)
    times.take(4, 1000.0)
    assert times.mean(4) == pytest.approx((3 + 6 + 10) / 6)
    assert times.mean(5) == 0.0


def test_a_machine_that_has_become_another_is_believed_soon() -> None:
    times = taken((1, 1.0), often=500)
    for _ in range(11):
        times.take(1, 2.0)
    assert times.curve(1, 1).of(1) == 2.0


def test_the_first_time_of_a_size_may_be_that_of_what_is_done_once() -> None:
    times = Times()
    times.take(3, 9.0)
    assert not times.known(3)
    times.take(3, 1.0)
    assert times.known(3)
    assert times.curve(3, 3).of(3) == 1.0


def test_old_times_are_forgotten() -> None:
    times = taken((3, 1.0))
    for _ in range(1000):
        times.take(1, 0.5)
    assert times.known(3)
    times.take(1, 0.5)
    assert not times.known(3)
    assert times.curve(1, 3).of(3) == 0.5
    times.take(3, 9.0)
    times.take(3, 8.0)
    assert times.curve(3, 3).of(3) == 8.0


def test_between_known_sizes_less_than_the_line_is_hoped_for_unless_they_are_near() -> None:
    curve = Curve([1, 5, 6], [1.0, 3.0, 4.0])
    assert [curve.of(size) for size in (1, 3, 5, 6)] == [1.0, 1.5, 3.0, 4.0]
    assert Curve([20, 22], [2.0, 3.0]).of(21) == 2.5


def test_beyond_the_largest_half_of_the_rise_up_to_there_is_hoped_for() -> None:
    assert Curve([1, 2], [1.0, 1.5]).of(6) == pytest.approx(1.5 + 4 * 0.25)
    assert Curve([8], [1.0]).of(16) == 1.0
    # One place is no slope: what is measured is not exact.
    assert Curve([8, 16, 17], [1.0, 2.0, 4.0]).of(18) == pytest.approx(4.0 + 0.5 * 2.0)
    assert Curve([], []).of(3) == 0.0
    assert Curve([8], [4.0]).of(2) == 1.0


def test_more_is_never_thought_to_be_done_in_less() -> None:
    times = taken((1, 1.0), (2, 3.0), (3, 1.0), (4, 4.0), often=4)
    curve = times.curve(1, 4)
    assert [curve.of(size) for size in (1, 2, 3, 4)] == [1.0, 2.0, 2.0, 4.0]


def test_a_curve_has_the_nearest_known_sizes_around_what_is_asked_for() -> None:
    times = taken(*((size, float(size)) for size in (1, 2, 4, 8, 12)))
    assert times.curve(4, 8).sizes == [2, 4, 8]
    assert times.curve(5, 6).sizes == [4, 8]
    assert times.curve(7, 9).sizes == [4, 8, 12]
    assert times.curve(1, 1).sizes == [1]


def test_large_sizes_are_known_by_their_like() -> None:
    times = taken((100, 5.0))
    assert times.known(101)
    assert not times.known(120)
    assert times.curve(101, 101).of(101) == 5.0
