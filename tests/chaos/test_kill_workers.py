"""Whenever a worker is killed, nothing is lost, nothing comes twice, and every stream is what it would have been."""

from __future__ import annotations

import pytest

from tests.chaos.kill_workers import Plan, run


@pytest.mark.slow
def test_streams_survive_workers_killed_at_random() -> None:
    plan = Plan(kills=3, seed=1, engine="stub", lease=2.0, pause=(0.5, 1.5), longest=150, max_deaths=10)
    findings = run(plan)
    assert not findings.faults, findings.summary()
    assert findings.tasks > 0
    assert any(findings.gaps) or findings.struck_again, "no worker was killed while it made a stream"
    assert findings.comparison is not None
    assert not findings.comparison.different
