"""What a worker's engine did with a task outlives it, and is told while it happens."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import TINY, gateway
from tests.processes import Worker, valkey
from tests.waiting import PATIENCE_S, StepGate, until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(400)]
PROMPT = list(range(300, 364))


def test_preemptions_cache_hits_and_phases_are_told_by_a_real_worker(tmp_path: Path) -> None:
    """A worker with one place: a task of a better tier takes it."""
    engine = {"dtype": "float32", "threads": 1, "max_num_seqs": 1}
    steps, limits = StepGate(tmp_path), count(20)
    with valkey() as (url, _):
        worker = Worker(
            url,
            model=str(TINY),
            engine_factory="workers.runtime.worker:load_engine",
            engine=engine,
            lease=60.0,
            release_preempted=600.0,
            LOG_LEVEL="WARNING",
            **steps.environment,
        )
        with worker, gateway(url) as (address, _), httpx.Client(base_url=address, timeout=PATIENCE_S) as http:
            worker.wait_ready(180)
            _until_settled(http, _submitted(http, "default", 2))
            with steps.held():
                low = _submitted(http, "batch", 400)
                until(lambda: _explained(http, low)["status"] == "in_progress")
                high = _submitted(http, "priority", 400)
                until(lambda: _explained(http, high)["status"] == "in_progress")

                def preempted() -> bool:
                    """After a step more."""
                    steps.hold(next(limits))
                    return [reason["name"] for reason in _explained(http, low)["blocked_by"]] == ["preempted"]

                until(preempted)
                assert "and waits there" in _explained(http, low)["summary"]
            _until_settled(http, high)
            _until_settled(http, low)
            said = _explained(http, low)
    (attempt,) = said["attempts"]
    assert attempt["why"] == "ended"
    assert attempt["cached_tokens"] > 0
    assert attempt["preemptions"] >= 1
    assert attempt["preempted"][0]["why"] == "better_tier"
    assert list(said["phases"]) == ["submit", "queue", "worker", "first_token", "output", "settle"]


def _submitted(http: httpx.Client, tier: str, count: int) -> str:
    task = {"model": "tiny", "prompt": PROMPT, "tier": tier, "max_tokens": count, "ignore_eos": True}
    answer = http.post("/v1/tasks", json=task)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def _explained(http: httpx.Client, task_id: str) -> dict[str, Any]:
    return dict(http.get(f"/v1/tasks/{task_id}/explain").json())


def _until_settled(http: httpx.Client, task_id: str) -> None:
    """Wait for its end, and for its worker to be done with it."""
    until(lambda: http.get(f"/v1/tasks/{task_id}").json()["settled_at"] is not None)
