"""`POST /v1/tasks/{id}/retry`, and answers that wait for a task's end (`Prefer: wait`)."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Open, Submit, until
from tests.waiting import PATIENCE_S


def fields(valkey: Redis, task_id: str) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in valkey.hgetall(keys.task(task_id)).items()}


def test_a_task_that_ended_runs_again_as_another_one(
    http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
) -> None:
    hook = {"url": "https://93.184.216.34/hook", "secret": "whsec_" + "A" * 32, "events": ["response.failed"]}
    old = submit(metadata={"a": "b"}, tenant="acme", tier="flex", timeout=60, webhook=hook)
    assert worker.claim(old).answer == "go"
    worker.finish(old, [0], status="failed", reasons=[], error={"code": "engine_error", "message": "It broke."})
    answer = http.post(f"/v1/tasks/{old}/retry", headers={"idempotency-key": "again"})
    new = answer.json()["id"]
    assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/tasks/{new}")
    before, after = fields(valkey, old), fields(valkey, new)
    kept = ("task", "model", "queue", "tier", "tenant", "metadata", "webhook", "webhook_secret", "origin")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert int(after["deadline"]) >= int(before["deadline"])
    view = http.get(f"/v1/tasks/{new}").json()
    assert (view["retried_from"], view["status"]) == (old, "queued")
    assert view["webhook"] == {"url": hook["url"], "events": hook["events"]}
    assert "whsec" not in json.dumps([view, answer.json(), http.get("/v1/tasks").json()])
    again = http.post(f"/v1/tasks/{old}/retry", headers={"idempotency-key": "again"})
    assert (again.json()["id"], again.headers["idempotent-replayed"]) == (new, "true")


def test_a_task_that_has_not_ended_is_not_retried(http: httpx.Client, submit: Submit, valkey: Redis) -> None:
    task_id = submit()
    before = valkey.dbsize()
    answer = http.post(f"/v1/tasks/{task_id}/retry")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "task_not_final")
    assert answer.headers["x-should-retry"] == "false"
    assert http.post("/v1/tasks/nobody/retry").status_code == 404
    assert valkey.dbsize() == before


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/tasks/{}"])
def test_an_answer_waits_for_the_tasks_end(
    http: httpx.Client, submit: Submit, worker: FakeWorker, model: str, path: str
) -> None:
    def serve(task_id: str | None) -> None:
        worker.serve(task_id or worker.take(QUEUE, 60) or "", ["x"])

    known = submit() if "{}" in path else None
    thread = threading.Thread(target=serve, args=(known,))
    thread.start()
    head = {"prefer": "respond-async, wait=60"}
    if known:
        answer = http.get(path.format(known), headers=head)
    else:
        answer = http.post(path, json={"model": model, "prompt": "x"}, headers=head)
        assert answer.headers["location"] == f"/v1/tasks/{answer.json()['id']}"
    thread.join()
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "x")
    assert answer.headers["preference-applied"] == "wait=60"


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [
        ("wait=0", "wait=0"),
        ("wait=00000000000", "wait=0"),
        ("wait=0; x=1", "wait=0"),
        ("wait=-1", None),
        ("wait=x", None),
        ("return=minimal", None),
    ],
)
def test_an_answer_that_has_waited_shows_the_task_as_it_is(
    http: httpx.Client, submit: Submit, model: str, prefer: str, applied: str | None
) -> None:
    for answer, status in (
        (http.post("/v1/tasks", json={"model": model, "prompt": "x"}, headers={"prefer": prefer}), 202),
        (http.get(f"/v1/tasks/{submit()}", headers={"prefer": prefer}), 200),
    ):
        assert (answer.status_code, answer.json()["status"]) == (status, "queued")
        assert answer.headers.get("preference-applied") == applied


def test_a_gateway_that_stops_answers_who_waits(open_door: Open, model: str) -> None:
    door, answers = open_door(), list[Any]()

    def ask() -> None:
        body = {"model": model, "prompt": "x"}
        answers.append(httpx.post(f"{door.url}/v1/tasks", json=body, headers={"prefer": "wait=60"}, timeout=PATIENCE_S))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: len(door.app.state.streams) == 1)
    door.end_streams()
    thread.join()
    assert answers[0].status_code == 202
