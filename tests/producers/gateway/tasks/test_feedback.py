"""`POST /v1/feedback`: a finished task gets one score, of which rollouts get a row."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from redis import Redis

from producers import Client
from producers.contract import keys
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Submit


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def give(http: httpx.Client, task_id: str, score: Any = 1) -> httpx.Response:
    return http.post("/v1/feedback", json={"id": task_id, "score": score})


def test_a_task_that_ended_gets_a_score_once_by_any_of_its_ids(
    http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
) -> None:
    task_id = submit()
    assert code(give(http, task_id)) == (409, "task_not_final")
    worker.serve(task_id, ["x"])
    answer = give(http, f"chatcmpl-{task_id}", 0.25)
    assert answer.json() == {"object": "feedback", "task": task_id, "score": 0.25}
    assert give(http, f"resp_{task_id}", 0.25).status_code == 200
    assert code(give(http, task_id, 1)) == (409, "feedback_exists")
    ((_, row),) = valkey.xrange(keys.FEEDBACK)
    record = valkey.hgetall(keys.task(task_id))
    assert (record[b"feedback"], row[b"score"]) == (b"0.25", b"0.25")
    assert (row[b"model"], row[b"version"], row[b"created"]) == (b"tiny", record[b"version"], record[b"created"])


def test_an_id_that_its_caller_chose_may_begin_as_those_of_openai(
    http: httpx.Client, model: str, valkey_url: str, worker: FakeWorker
) -> None:
    with Client(valkey_url) as client:
        for task_id in ("x", "resp_x"):
            client.submit(model=model, prompt=[1], task_id=task_id)
            worker.serve(task_id, ["x"])
    assert give(http, "resp_x", 0).json()["task"] == "resp_x"
    assert give(http, "chatcmpl-x", 1).json()["task"] == "x"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"score": 1}, "missing_parameter"),
        ({"id": "x"}, "missing_parameter"),
        ({"id": "x", "score": "1"}, "invalid_type"),
        ({"id": "x", "score": True}, "invalid_type"),
        ({"id": "x", "score": 1.1}, "invalid_value"),
        ({"id": "x", "score": -0.1}, "invalid_value"),
        ({"id": "x", "score": 10**400}, "invalid_value"),
        ({"id": "x" * 201, "score": 1}, "invalid_value"),
        ({"id": "x", "score": 1, "comment": "good"}, "unknown_parameter"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    http: httpx.Client, valkey: Redis, body: dict[str, Any], expected: str
) -> None:
    assert code(http.post("/v1/feedback", json=body)) == (400, expected)
    assert not valkey.exists(keys.FEEDBACK)
    assert code(give(http, "nobody")) == (404, "task_not_found")
