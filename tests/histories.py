"""Random histories: `make test` draws the same few each time; where HISTORIES is set, each run draws others.

    HISTORIES=50 .venv/bin/python -m pytest tests/engine -k histories --timeout 0

draws 50 times as many; `make test-all` sets 1. A run that fails names its seed, HISTORIES_SEED, which draws them again.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("HISTORIES", "0"))
#: The processes of pytest-xdist inherit it.
SEED = int(os.environ.setdefault("HISTORIES_SEED", str(secrets.randbits(32)))) if TIMES else 0

# Left to itself, Hypothesis fails an example that takes 200 ms, and a test whose first inputs take a second to draw: a
# busy machine stops any process for longer than that.
settings.register_profile(
    "penstock",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not TIMES,
    print_blob=bool(TIMES),
)
settings.load_profile("penstock")


def examples(few: int, many: int) -> int:
    """The number that a test draws: `few` in `make test`, `many` where HISTORIES is set."""
    return many if TIMES else few


def histories(examples: int, steps: int, **more: Any) -> settings:
    """Settings for a state machine: `examples` histories of up to `steps` calls, HISTORIES times as many where set."""
    number = examples * max(TIMES, 1)
    return settings(max_examples=number, stateful_step_count=steps, suppress_health_check=list(HealthCheck), **more)


def seeds(count: int) -> range:
    """Seeds for tests that draw by themselves; `make test` takes them from 0."""
    return range(SEED, SEED + count * max(TIMES, 1))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hands the seed to Hypothesis, whose plugin reads its option later."""
    if TIMES:
        config.option.hypothesis_seed = SEED


def pytest_report_header() -> list[str]:
    """Tells also of a run that is killed how its histories are drawn again."""
    return [f"HISTORIES={TIMES} HISTORIES_SEED={SEED}"] if TIMES else []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tells how the histories of a run that failed are drawn again."""
    if TIMES and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"These histories are drawn again by HISTORIES={TIMES} HISTORIES_SEED={SEED}.")
