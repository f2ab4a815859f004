"""The soak in small: with a leak planted in one of two workers, that one is found out, and nothing else is accused."""

from __future__ import annotations

import pytest

from tests.fuzz.soak import Plan, allowed_for, soak


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_planted_leak_is_found_and_nothing_else_is_accused() -> None:
    plan = Plan(0.0, rounds=15, round_s=0.4, each=3, drawn=60, lease=1.5, plugins=("", "tests.fuzz.leaks:leak"))
    soaked = soak(plan)
    assert soaked.faults == []
    leaking = soaked.leaking
    assert {"worker 2 memory", "worker 2 files"} <= set(leaking)
    # Memory of the others, and what the server keeps for its time, have not come to rest after so short a time.
    settled = [name for name in leaking if name.endswith(("files", "threads", "lasting keys", "KV blocks"))]
    assert settled == ["worker 2 files"]
    assert soaked.counts["fuzzed messages"] == 90
    assert "**yes**" in soaked.table()


@pytest.mark.parametrize(
    ("name", "quantity"), [("worker 2 files", 2), ("KV blocks", 0), ("lasting keys", 4), ("keys", 40)]
)
def test_what_is_allowed_goes_by_the_quantity(name: str, quantity: int) -> None:
    assert allowed_for(name) == quantity
