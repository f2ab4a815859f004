"""Broken candidates on a real system: real weights, gateway, workers and sweeper."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench import candidates
from tests.bench.rolled import PLAN, UP, System, rollout

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    served = System(tmp_path, *UP)
    yield served
    served.stop()


@pytest.mark.parametrize(("change", "metric"), [(candidates.nan_in_a_token, "failed"), (candidates.refuses, "refused")])
def test_one_that_fails_or_refuses_is_rolled_back_at_the_first_step(system: System, change: Any, metric: str) -> None:
    folder = candidates.candidate(system.folder, change)
    result = asyncio.run(rollout(system, f"./{folder.name}", PLAN))
    assert (result["phase"], result["step"]) == ("rolled_back", 0)
    assert result["reason"].startswith(f"{metric}: ")


def test_fluent_garbage_is_rolled_back_by_copies_before_a_caller_gets_it(system: System) -> None:
    folder = candidates.candidate(system.folder, candidates.garbage)
    candidates.copy_tasks(system, folder)
    result = asyncio.run(rollout(system, f"./{folder.name}", candidates.COPIES))
    assert (result["phase"], result["step"], result["candidate_requests"]) == ("rolled_back", 0, 0)
    assert result["reason"].startswith("likelihood: ")
