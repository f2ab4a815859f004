"""How many random histories the state machines of scheduler and KV run: few and the same ones in the test suite.

    HISTORIES=50 .venv/bin/python -m pytest tests/engine -k histories --timeout 0

runs 50 times as many, other ones each time.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings


def histories(examples: int) -> settings:
    times = int(os.environ.get("HISTORIES", "1"))
    return settings(
        max_examples=examples * times,
        stateful_step_count=30,
        deadline=None,
        derandomize=times == 1,
        suppress_health_check=list(HealthCheck),
    )
