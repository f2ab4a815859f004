"""Requests whose caller waits, with an Idempotency-Key: the next try gets the first one's answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import AsyncClient
from producers.broker.redis import keys as broker_keys
from producers.client.leases import ReaderLeases
from producers.contract import keys
from producers.gateway.tasks.foreground import KEPT_S
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Open, until
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, says

KEY, OTHER_KEY = {"idempotency-key": "k"}, {"idempotency-key": "other"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}


def chunks(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_an_answer_is_given_again_and_its_task_made_once(
    http: httpx.Client, answering: Answering, valkey: Redis
) -> None:
    answering.scripts = [says("Hello")]
    first = http.post("/v1/chat/completions", json=CHAT, headers=KEY)
    again = http.post("/v1/chat/completions", json=CHAT, headers=KEY)
    assert (first.status_code, again.json()) == (200, first.json())
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    (task,) = valkey.keys(keys.task("*"))
    assert int(valkey.hget(task, "ttl")) == KEPT_S, "as long as the key is"
    other = http.post("/v1/chat/completions", json=CHAT | {"n": 2}, headers=KEY)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "tiny", "prompt": [[5], [6]]}),
        ("/v1/responses", {"model": "tiny", "input": "x"}),
        ("/v1/responses", {"model": "tiny", "input": "x", "background": True}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x"}),
    ],
)
def test_a_request_that_is_repeated_when_nobody_serves_its_model_gets_its_answer(
    http: httpx.Client, answering: Answering, valkey: Redis, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    first = http.post(path, json=body, headers=KEY)
    made = valkey.keys(keys.task("*"))
    card = json.loads(valkey.hget(keys.MODELS, "tiny") or "")
    valkey.hset(keys.MODELS, "tiny", json.dumps(card | {"withdrawn": 1}))
    monkeypatch.setattr("producers.client.directory.FRESH_S", 0.0)
    again = http.post(path, json=body, headers=KEY)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (first.status_code, "true")
    assert again.json()["id"] == first.json()["id"]
    others: list[dict[str, Any]] = [
        {"json": body},
        {"json": body | {"temperature": 0.5}, "headers": KEY},
        {"json": body, "headers": OTHER_KEY},
    ]
    for other in others:
        refused = http.post(path, **other)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found"), other
    assert sorted(valkey.keys(keys.task("*"))) == sorted(made)
    valkey.hset(keys.MODELS, "tiny", json.dumps(card))
    assert http.post(path, json=body | {"temperature": 0.5}, headers=OTHER_KEY).is_success, (
        "a refused request takes no key"
    )


def test_a_stream_that_broke_is_read_again_from_its_beginning(
    http: httpx.Client, worker: FakeWorker, valkey: Redis
) -> None:
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=KEY) as broken:
        task_id = until(lambda: worker.take(QUEUE))
        worker.claim(task_id)
        worker.append(task_id, 0, ["Hel"])
        begin = chunks([next(line for line in broken.iter_lines() if line)])
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=KEY) as answer:
        assert worker.append(task_id, 1, ["lo"])[0] == "ok", "the first caller's leaving has cancelled nothing"
        worker.finish(task_id, [2])
        found = chunks(list(answer.iter_lines()))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found) == "Hello"
    assert {chunk["id"] for chunk in begin + found} == {f"chatcmpl-{task_id}"}
    assert valkey.llen(broker_keys.tier_list(QUEUE, "default")) == 0


def test_a_caller_who_stays_away_has_cancelled_its_request(
    open_door: Open, model: str, worker: FakeWorker, valkey: Redis
) -> None:
    door = open_door(reader_lease=0.2, sweep=True)
    http = door.http
    with http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=KEY):
        task_id = until(lambda: worker.take(QUEUE))
    until(lambda: valkey.hget(keys.task(task_id), "status") == b"cancelled")
    again = http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=KEY)
    assert chunks(again.text.splitlines())[0]["error"]["code"] == "cancelled"


def test_of_many_prompts_only_those_are_made_that_were_not(
    http: httpx.Client, answering: Answering, valkey: Redis
) -> None:
    """As after a gateway that was killed between two of its submits."""
    body = {"model": "tiny", "prompt": [[5], [6], [7]]}
    answering.scripts = [says("x")] * 4
    first = http.post("/v1/completions", json=body, headers=KEY).json()
    tasks = {name.decode() for name in valkey.keys(keys.task("*"))}
    (lost, *_) = tasks - {keys.task(first["id"].removeprefix("cmpl-"))}
    valkey.delete(lost, lost.replace("task:", "stream:"))
    second = http.post("/v1/completions", json=body, headers=KEY).json()
    assert (second["id"], len(second["choices"])) == (first["id"], 3)
    assert {name.decode() for name in valkey.keys(keys.task("*"))} == tasks
    assert len(answering.records) == 4


async def test_requests_of_one_key_hold_their_lease_together(valkey_url: str, valkey: Redis) -> None:
    async with AsyncClient(valkey_url) as client:
        readers = ReaderLeases(client)
        await readers.enter(["t"])
        await readers.enter(["t"])
        await readers.leave(["t"], lapse=["t"])
        assert len(readers) == 1
        await readers.leave(["t"])
        assert (len(readers), valkey.zcard(keys.READERS)) == (0, 0)
