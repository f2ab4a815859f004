"""The trace that a request names is that of the tasks that it makes, and of no other."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.record import Record
from tests.producers.contract.test_record import GOOD, TRACE
from tests.producers.gateway.openai.conftest import MESSAGES, Answering


@pytest.mark.parametrize(
    ("path", "body", "tasks"),
    [
        ("/v1/tasks", {"prompt": "x"}, 1),
        ("/v1/chat/completions", {"messages": MESSAGES}, 1),
        ("/v1/completions", {"prompt": ["x", "y"]}, 2),
    ],
)
def test_every_task_of_a_request_has_its_trace(
    http: httpx.Client, answering: Answering, valkey: Redis, path: str, body: dict[str, Any], tasks: int
) -> None:
    def traces(*headers: tuple[str, str]) -> set[str | None]:
        valkey.delete(*(valkey.keys(keys.task("*")) or ["none"]))
        assert http.post(path, json={"model": "tiny", **body}, headers=list(headers)).is_success
        made = valkey.keys(keys.task("*"))
        assert len(made) == tasks
        return {Record.parse("", valkey.hgetall(name)).fields.get("traceparent") for name in made}

    assert traces(("traceparent", GOOD)) == {GOOD}
    assert traces() == {None}
    assert traces(("traceparent", GOOD), ("traceparent", GOOD)) == {None}
    assert traces(("traceparent", f"{GOOD}0")) == {None}


def test_the_task_says_its_trace(http: httpx.Client, model: str) -> None:
    made = http.post("/v1/tasks", json={"model": model, "prompt": "x"}, headers={"traceparent": GOOD})
    assert http.get(made.headers["location"]).json()["trace_id"] == TRACE
