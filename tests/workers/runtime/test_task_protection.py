"""A worker in an ECS task protects it while it holds tasks. The agent is a real server, but for its address."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.waiting import PATIENCE_S, until
from tests.workers.http_server import Handler, HttpServer
from tests.workers.rig import Rig
from workers.runtime import aws
from workers.runtime.aws import TaskProtection

ON = {"ProtectionEnabled": True, "ExpiresInMinutes": 30}
OFF = {"ProtectionEnabled": False}


class Agent(HttpServer):
    """As ECS' agent has it. `states`: what was set; `refusal`: status and body of its answer instead."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self.refusal: tuple[int, bytes] | None = None
        self.asked = 0
        agent = self

        class State(Handler):
            def do_PUT(self) -> None:
                agent.asked += 1
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                assert self.path == "/api/id/task-protection/v1/state"
                assert self.headers["content-type"] == "application/json"
                assert set(body) <= {"ProtectionEnabled", "ExpiresInMinutes"}
                status, said = agent.refusal or (200, json.dumps({"protection": {"TaskArn": "arn", **body}}).encode())
                if agent.refusal is None:
                    agent.states.append(body)
                self.tell(status, said)

        super().__init__(State)
        self.uri = f"{self.url}/api/id"


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def held(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A worker's tasks, followed by a thread that is in a hurry."""
    monkeypatch.setattr(aws, "LOOK_S", 0.005)
    monkeypatch.setattr(aws, "LEAST_S", 0.05)
    monkeypatch.setattr(aws, "RETRY_S", 0.01)
    found: list[str] = []
    following = TaskProtection(lambda: bool(found), agent.uri)
    following.start()
    yield found
    following.stop()
    following.join(PATIENCE_S)


def test_a_task_is_protected_while_it_holds_something(agent: Agent, held: list[str]) -> None:
    time.sleep(0.05)
    assert agent.asked == 0, "an idle task needs no protection"
    held.append("a")
    until(lambda: agent.states == [ON])
    held.append("b")
    time.sleep(0.05)
    assert agent.asked == 1, "it is not set anew with every task"
    held.clear()
    until(lambda: agent.states == [ON, OFF])


def test_a_protection_is_renewed_before_it_lapses(
    agent: Agent, held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "RENEW_S", 0.02)
    held.append("a")
    until(lambda: agent.states[:3] == [ON, ON, ON])


@pytest.mark.parametrize(
    "refusal",
    [
        (400, b'{"error": {"Arn": "arn", "Code": "AccessDeniedException", "Message": "not authorized"}}'),
        (200, b'{"failure": {"Arn": "arn", "Reason": "TASK_NOT_VALID", "Detail": "not of a service"}}'),
        (500, b""),
        (200, b"<html>"),
    ],
)
def test_a_refusal_is_told_once_and_asked_again(
    agent: Agent, held: list[str], caplog: pytest.LogCaptureFixture, refusal: tuple[int, bytes]
) -> None:
    agent.refusal = refusal
    with caplog.at_level(logging.WARNING):
        held.append("a")
        until(lambda: agent.asked > 2)
        agent.refusal = None
        until(lambda: agent.states == [ON])
    told = [record.getMessage() for record in caplog.records if "task's protection" in record.getMessage()]
    assert len(told) == 1
    assert refusal[1].decode() in told[0]


def test_a_worker_in_ecs_protects_its_task(agent: Agent, rig: Rig) -> None:
    worker = rig.worker(ECS_AGENT_URI=agent.uri, STUB_STEP_S=0.01, drain=0.0)
    rig.fill(1, max_tokens=4000)
    rig.until(lambda: agent.states == [ON])
    assert worker.stop() == 0
