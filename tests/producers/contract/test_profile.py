"""A profile's figures, from whoever wrote them, and as merged over workers."""

from __future__ import annotations

import pytest

from producers.contract.profile import Profile, sane

START = {"weights": 1.0, "total": 2.0}
KEPT = Profile(knee=20.0, tokens_per_s=1000.0, tokens_per_task=200.0, kv_capacity=4096.0, cold_start=START)


@pytest.mark.parametrize("said", ["1", None, True, [], float("nan"), float("inf"), -1, -0.001, 10**400])
def test_what_is_no_sane_figure_is_missing(said: object) -> None:
    assert sane(said) is None
    assert Profile.of({"knee": said, "cold_start": {"total": said}}) == Profile()


@pytest.mark.parametrize("text", [None, "", "no JSON", b"\xff", "[1]", "[" * 100_000, '{"cold_start": 3}'])
def test_what_is_no_profile_is_an_empty_one(text: str | bytes | None) -> None:
    assert Profile.from_json(text) == Profile()


def test_it_comes_back_as_it_was_written() -> None:
    idle = Profile(knee=3.0, duty=0.0, cold_start=START)
    assert Profile.from_json(idle.to_json()) == idle


def test_a_worker_without_load_erases_nothing() -> None:
    nothing = Profile(duty=0.0, kv_capacity=512.0, cold_start={"total": 9.0})
    assert KEPT.merged(nothing, fresh=False, started=False) == KEPT
    started = KEPT.merged(nothing, fresh=False, started=True)
    assert (started.knee, started.tokens_per_s, started.duty) == (20.0, 1000.0, None)
    assert (started.kv_capacity, started.cold_start) == (512.0, {"total": 9.0})


def test_each_measurement_moves_a_figure_half_of_the_way() -> None:
    seen = Profile(knee=40.0, reached=24.0, tokens_per_s=1030.0)
    merged = KEPT.merged(seen, fresh=True, started=False)
    assert (merged.knee, merged.tokens_per_s, merged.tokens_per_task) == (30.0, 1000.0, 200.0)
    assert merged.reached is None
    assert KEPT.merged(seen, fresh=False, started=False) == KEPT, "it has said so before"


def test_a_knee_from_low_load_does_not_raise_the_kept_one() -> None:
    seen = Profile(knee=60.0, reached=5.0, tokens_per_s=3000.0, tokens_per_task=100.0)
    merged = KEPT.merged(seen, fresh=True, started=False)
    assert (merged.knee, merged.tokens_per_s, merged.tokens_per_task) == (20.0, 1000.0, 150.0)
    lower = KEPT.merged(Profile(knee=10.0, reached=5.0, tokens_per_s=500.0), fresh=True, started=False)
    assert (lower.knee, lower.tokens_per_s) == (15.0, 750.0)


def test_the_first_measurement_counts_as_it_is() -> None:
    assert Profile().merged(KEPT, fresh=False, started=False) == KEPT
