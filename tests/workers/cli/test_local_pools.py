"""The pools of `penstock up` while a version of its model replaces another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from engine.text.checkpoint import model_version
from producers.admin.fleet import Fleet, Pool, Scaling
from tests.producers.gateway.conftest import TINY
from tests.waiting import auntil as until
from workers.autoscaler.actuators import ActuatorError
from workers.autoscaler.policy import Rules
from workers.cli import local_pools as pools
from workers.cli.gpus import Chosen
from workers.cli.local_pools import LocalPools, Plan
from workers.library import ResolvedModel

OLD = model_version(TINY)
NEW = {"version": "new", "reference": "tiny=/models/new", "workers": 2}


def fleet(card: str, **rollout: Any) -> Fleet:
    return Fleet([], versions={"tiny": card}, scaling=Scaling(rollouts={"tiny": rollout} if rollout else {}))


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pools of one model, whose workers only sleep."""
    monkeypatch.setattr(pools, "PENSTOCK", (sys.executable, "-c", "import time; time.sleep(600)"))
    found = LocalPools(
        Plan((ResolvedModel("tiny", TINY),), tmp_path, rules=Rules(min=0, max=2)),
        "here.7.ab",
        {},
        lambda name, line: None,
    )
    yield found
    await found.kill()


def named(running: LocalPools, at: Fleet) -> list[str]:
    return [one.settings.name for one in running(at)]


async def test_the_new_version_is_a_pool_beside_the_old_one_which_goes_when_its_workers_have(
    running: LocalPools,
) -> None:
    (before,) = running(fleet(OLD))
    assert before.settings.name == f"tiny@{OLD}"
    assert before.actuator is not None
    await before.actuator.scale(1, [])

    both = running(fleet(OLD, phase="starting", **NEW))
    assert [one.settings.version for one in both] == [OLD, "new"]
    new = both[1].actuator
    assert new is not None
    await new.scale(1, [])
    first, second = (child.program for child in running.children)
    assert (first.name, second.name) == ("worker.tiny.1", "worker.tiny.2")
    assert second.argv[second.argv.index("--model") + 1] == "tiny=/models/new"
    assert second.argv[-2:] == ["--name", "here.7.ab.worker.tiny.2"], "a withdrawal tells whose workers these are"

    assert named(running, fleet("new", phase="draining", **NEW)) == [f"tiny@{OLD}", "tiny@new"]
    assert named(running, fleet("new", phase="done", **NEW)) == [f"tiny@{OLD}", "tiny@new"]
    await before.actuator.aclose()
    assert [one.actuator for one in running(fleet("new", phase="done", **NEW))] == [new]
    await new.scale(2, [])  # in the place that the old version has left
    assert [child.program.name for child in running.children] == ["worker.tiny.2", "worker.tiny.1"]


async def test_a_version_that_a_rollout_leaves_is_a_pool_too_if_the_rollout_says_where_it_is(
    running: LocalPools,
) -> None:
    """As for an `up` that is started again while its own version comes back."""
    back = {"version": OLD, "reference": f"tiny={TINY}", "before": "new", "before_reference": "tiny=/models/new"}
    assert named(running, fleet("new", phase="starting", **back)) == [f"tiny@{OLD}", "tiny@new"]
    both = running(fleet(OLD, phase="draining", **back))
    assert [one.settings.version for one in both] == [OLD, "new"]
    assert both[1].actuator is not None
    await both[1].actuator.scale(1, [])
    (child,) = running.children
    assert child.program.argv[child.program.argv.index("--model") + 1] == "tiny=/models/new"
    await both[1].actuator.aclose()
    assert named(running, fleet(OLD, phase="done", **back)) == [f"tiny@{OLD}"]
    del back["before_reference"]
    assert named(running, fleet(OLD, phase="draining", **back)) == [f"tiny@{OLD}"], "nobody knows where it is"


async def test_a_version_that_is_kept_warm_gives_its_gpu_to_the_default_that_has_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PENSTOCK", (sys.executable, "-c", "import time; time.sleep(600)"))
    gpus = (Chosen("0", "GPU-0"), Chosen("1", "GPU-1"))
    plan = Plan((ResolvedModel("tiny", TINY),), tmp_path, rules=Rules(min=1, max=2), gpus=gpus)
    running = LocalPools(plan, "here.7.ab", {}, lambda name, line: None)
    try:
        (kept,) = running(fleet(OLD))
        assert kept.actuator is not None
        await kept.actuator.scale(1, [])
        at = fleet("new", phase="draining", **NEW)
        default = running(at)[1]
        assert default.actuator is not None
        await default.actuator.scale(1, [])
        assert [pool.settings.keep_warm for pool in running(at)] == [600, 600], "each has what it needs"
        with pytest.raises(ActuatorError, match="no GPU is free"):
            await default.actuator.scale(2, [])
        assert running(at)[0].settings.keep_warm == 0
        await kept.actuator.scale(0, [])
        await until(lambda: len(running.children) == 1)
        await default.actuator.scale(2, [])
        assert running(at)[0].settings.keep_warm == 600
    finally:
        await running.kill()


async def test_a_version_whose_rollout_failed_is_forgotten(running: LocalPools) -> None:
    assert len(named(running, fleet(OLD, phase="starting", **NEW))) == 2
    assert named(running, fleet(OLD, phase="failed", **NEW)) == [f"tiny@{OLD}"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_version_whose_rollout_failed_is_served_until_nothing_of_it_is_left(
    running: LocalPools, *, restarted: bool
) -> None:
    """Tasks keep their version, so nobody else does those that it took: also an `up` that came later knows it."""
    if not restarted:
        running(fleet(OLD, phase="starting", **NEW))
    after = fleet(OLD, phase="failed", **NEW)
    after.pools.append(Pool("tiny@new.f", "tiny", in_flight=1))
    assert named(running, after) == [f"tiny@{OLD}", "tiny@new"]
    after.pools.clear()
    assert named(running, after) == [f"tiny@{OLD}"]


async def test_without_a_card_the_own_version_stays(running: LocalPools) -> None:
    assert named(running, Fleet([])) == [f"tiny@{OLD}"]
    assert named(running, fleet("another")) == [f"tiny@{OLD}"]


async def test_a_fixed_number_is_left_alone_once_an_operator_told_a_worker_to_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PENSTOCK", (sys.executable, "-c", "pass"))  # ends at once, as one that was told to
    running = LocalPools(Plan((ResolvedModel("tiny", TINY),), tmp_path), "here.7.ab", {}, lambda name, line: None)
    (pool,) = running(fleet(OLD))
    assert pool.actuator is not None
    await pool.actuator.scale(1, [])
    (child,) = running.children
    assert child.keeper is not None
    await child.keeper
    assert running(fleet(OLD)) == []
    assert len(running(fleet(OLD, phase="starting", **NEW))) == 2
    await running.kill()
