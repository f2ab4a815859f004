"""A plan is a function of its seed, is written down, and says no more than its system can suffer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.driver import ALL_KINDS, plan_of, targets
from tests.chaos.stage import Shape
from workers.trials.chaos.load import Load
from workers.trials.chaos.plan import KINDS, Plan, draw


def _plan(seed: int) -> Plan:
    return plan_of(seed, Shape(), seconds=120, kinds=ALL_KINDS, pause=(0.1, 0.5))


def test_the_same_seed_plans_the_same_and_another_does_not(tmp_path: Path) -> None:
    assert _plan(3) == _plan(3)
    assert _plan(3).faults != _plan(4).faults
    _plan(3).write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == _plan(3)


def test_every_kind_comes_and_hits_what_it_may() -> None:
    there, plan = targets(Shape()), _plan(1)
    role_of = {name: role for role, names in there.items() for name in names}
    assert {fault.kind for fault in plan.faults} == set(ALL_KINDS)
    assert {role_of[fault.target] for fault in plan.faults} == set(there)
    for fault in plan.faults:
        assert role_of[fault.target] in KINDS[fault.kind].roles
    assert [fault.at for fault in plan.faults] == sorted(fault.at for fault in plan.faults)


def test_kills_are_counted_however_long_they_take() -> None:
    plan = plan_of(1, Shape(), seconds=1, kinds=("kill", "pause"), kills=30)
    assert sum(fault.kind == "kill" for fault in plan.faults) == 30
    assert plan.seconds > 30


def test_what_nothing_here_can_suffer_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing here can suffer cut"):
        draw(1, 10, lambda kind: {}, kinds=["cut"], lease=1)


def test_a_file_that_holds_no_plan_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"seed": 1}', '{"faults": [{"when": 1}]}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(ValueError):  # noqa: PT011 - json's own, or ours
            Plan.read(tmp_path / "plan.json")


def test_tasks_are_a_function_of_seed_and_number() -> None:
    load, same, other = (Load(seed, "stub", 10, 50, ids=100) for seed in (1, 1, 2))
    assert [load.task(k) for k in range(10)] == [same.task(k) for k in range(10)]
    assert [load.manner(k) for k in range(99)] == [same.manner(k) for k in range(99)]
    assert load.task(0) != other.task(0)
    assert {load.manner(k).via for k in range(99)} == {"http", "redis", "poll", "celery", "waiting"}
    assert all(load.manner(k).variant == k % 10 for k in range(99))
