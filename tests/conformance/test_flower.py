"""Flower, unmodified, beside a real system: what it shows of tasks, and what it does to them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from producers.contract import keys
from tests.conformance.clients import INSTALLED
from tests.conformance.conftest import System
from tests.processes import free_port
from tests.waiting import PATIENCE_S, until, within

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LONG = {"prompt": "import ", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def flower(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Its API, once it hears of tasks: it asks the workers for their events itself."""
    log, port = tmp_path_factory.mktemp("flower") / "flower.log", free_port()
    environment = os.environ | {"BROKER_URL": system.store_url, "FLOWER_UNAUTHENTICATED_API": "true"}
    command = [str(INSTALLED.with_name("celery")), "flower", "--address=127.0.0.1", f"--port={port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=log.parent)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as api:
            until(lambda: _answers(api, process, log))
            until(lambda: _hears(api, _sent(api, prompt="import ", max_tokens=1)))
            yield api
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def _answers(api: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return api.get("/api/workers").status_code == 200
    except httpx.TransportError:
        return False


def _hears(api: httpx.Client, task_id: str) -> bool:
    return within(lambda: _known(api, task_id), seconds=2)


def _sent(api: httpx.Client, **kwargs: Any) -> str:
    """The id of a task that Flower has sent."""
    answer = api.post(
        "/api/task/send-task/penstock.generate", json={"kwargs": kwargs, "queue": keys.model_queue("tiny")}
    )
    return str(answer.raise_for_status().json()["task-id"])


def _known(api: httpx.Client, task_id: str) -> dict[str, Any]:
    """What Flower knows of a task; empty if that is nothing."""
    answer = api.get(f"/api/task/info/{task_id}")
    return answer.json() if answer.status_code == 200 else {}


def _in_state(api: httpx.Client, task_id: str, state: str) -> dict[str, Any]:
    until(lambda: _known(api, task_id).get("state") == state)
    return _known(api, task_id)


def test_a_task_has_its_own_runtime(flower: httpx.Client, system: System) -> None:
    """It was that of Celery's tracer alone, a few milliseconds."""
    for task_id in (_sent(flower, prompt="import ", max_tokens=300, ignore_eos=True), _asked(system)):
        known = _in_state(flower, task_id, "SUCCESS")
        told = until(lambda task_id=task_id: _settled(system, task_id))
        # Each time is taken by another process or thread, which a busy machine may hold up.
        shortest, longest = (told[end] - told["started_at"] for end in ("last_token_at", "settled_at"))
        assert shortest / 2 <= known["runtime"] <= longest + 1
        assert known["started"] <= known["succeeded"]
        assert known["worker"] == f"penstock@{system.worker.name}"


def _settled(system: System, task_id: str) -> dict[str, Any] | None:
    told: dict[str, Any] = httpx.get(f"{system.url}/v1/tasks/{task_id}").raise_for_status().json()
    return told if "settled_at" in told else None


def _asked(system: System) -> str:
    """The id of a chat's task, which no Celery sender made."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Write f."}], "max_tokens": 20}
    answer = httpx.post(f"{system.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S).raise_for_status()
    return str(answer.json()["id"]).removeprefix("chatcmpl-")


@pytest.mark.exhaustive
def test_a_task_goes_through_its_states(flower: httpx.Client, system: System) -> None:
    wrong = _in_state(flower, _sent(flower, prompt="import ", max_tokens=-1), "FAILURE")
    assert "max_tokens must be an integer from 0" in wrong["exception"]
    with system.steps.held():
        task_id = _sent(flower, **LONG)
        assert _in_state(flower, task_id, "STARTED")["runtime"] is None
        assert flower.post(f"/api/task/revoke/{task_id}?terminate=true").status_code == 200
        _in_state(flower, task_id, "REVOKED")
    until(lambda: system.status(task_id) == "cancelled")


@pytest.mark.exhaustive
def test_its_pages_and_what_cannot_be_done(flower: httpx.Client, system: System) -> None:
    """A pool has the size of the engine's batch."""
    worker = f"penstock@{system.worker.name}"
    for page in ("/", "/tasks", f"/worker/{worker}", "/broker", "/metrics"):
        assert flower.get(page).status_code == 200, page
    queues = flower.get("/api/queues/length").json()["active_queues"]
    assert {"name": keys.model_queue("tiny"), "messages": 0} in queues
    answer = flower.post(f"/api/worker/pool/grow/{worker}?n=1")
    assert answer.status_code == 403
    assert "--max-num-seqs" in answer.text
