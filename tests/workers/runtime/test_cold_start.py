"""The phases of a start: what was marked, what it sums up to, and where it is told."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from workers.runtime import cold_start
from workers.runtime.cold_start import ColdStart, age


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A process that is 0.5 s old, whose clock stands until it is moved."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(cold_start, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(cold_start, "age", lambda: 0.5)
    return clock


def test_phases_sum_up_to_the_total(clock: SimpleNamespace) -> None:
    start = ColdStart()
    start.mark("process")
    for phase, seconds in (("imports", 1.0), ("connect", 0.25), ("weights", 2.0), ("imports", 0.5)):
        clock.now += seconds
        start.mark(phase)
    assert "total" not in start.figures
    clock.now += 0.25
    assert start.ready()
    assert start.figures == {"process": 0.5, "imports": 1.5, "connect": 0.5, "weights": 2.0, "total": 4.5}
    assert str(start) == "4.50 s: process 0.50, imports 1.50, connect 0.50, weights 2.00"
    clock.now += 60
    assert not start.ready(), "again, after a reconnect"
    assert start.figures["total"] == 4.5


@pytest.mark.parametrize(("waited", "claimed", "expected"), [(3.0, 1.0, 2.0), (3.0, -9.0, 3.0)])
def test_the_first_token_is_timed_from_ready_or_the_later_claim(
    clock: SimpleNamespace, waited: float, claimed: float, expected: float
) -> None:
    start = ColdStart()
    start.ready()
    ready = clock.now
    clock.now += waited
    start.first_token(ready + claimed)
    clock.now += 60
    start.first_token(clock.now)
    assert start.figures["first_token"] == expected
    assert start.figures["total"] == 0.5


def test_a_process_that_stood_by_begins_at_the_hand_over(clock: SimpleNamespace) -> None:
    start = ColdStart()
    start.mark("process")
    clock.now += 3600
    start.begin()
    clock.now += 0.25
    start.mark("weights")
    start.ready()
    assert start.figures == {"weights": 0.25, "connect": 0.0, "total": 0.25}


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, which Linux alone has")
def test_the_age_of_a_process_counts_from_its_start() -> None:
    """A process says how long it lives, which is less than what passed around it, and no less than its nap."""
    program = "import time; time.sleep(0.3); from workers.runtime.cold_start import age; print(age())"
    began = time.monotonic()
    said = float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 0.3 <= said <= time.monotonic() - began + 0.02
    assert age() >= 0
