"""Largest prompts and outputs of a key over HTTP, where a request is repeated or a task is retried."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import Client
from producers.contract import keys
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, Make, Open
from tests.producers.gateway.test_keys import as_caller, change, door, make
from tests.waiting import PATIENCE_S

__all__ = ["door", "make"]


LARGE = pytest.mark.parametrize(
    ("path", "body", "most"),
    [
        ("/v1/tasks", {"prompt": [1]}, "max_tokens"),
        ("/v1/completions", {"prompt": ["x", "y"]}, "max_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "background": True}, "max_output_tokens"),
    ],
)


@LARGE
def test_a_lowered_limit_refuses_no_answer_that_was_given_before(
    open_door: Open,
    make: Make,
    model: str,
    valkey: Redis,
    path: str,
    body: dict[str, Any],
    most: str,
) -> None:
    token = make(max_output=20)
    headers = {**as_caller(token), "idempotency-key": "one"}
    asked = {"model": model, most: 20, **body} | ({} if path == "/v1/tasks" else {"stream": True})

    def ask() -> tuple[int, str | None]:
        url = open_door(auth="keys").url
        with httpx.stream("POST", f"{url}{path}", json=asked, headers=headers, timeout=PATIENCE_S) as answer:
            return answer.status_code, answer.headers.get("idempotent-replayed")

    first = ask()
    made = valkey.keys(keys.task("*"))
    change(valkey, token, lambda key: replace(key, limits=replace(key.limits, max_output=19)))
    assert (first, ask()) == ((first[0], None), (first[0], "true"))
    assert sorted(valkey.keys(keys.task("*"))) == sorted(made)
    valkey.delete(made[0])
    assert ask()[0] == 400, "it would be made anew"


@LARGE
def test_what_is_too_large_for_a_key_takes_no_idempotency_key(
    http: httpx.Client, make: Make, model: str, path: str, body: dict[str, Any], most: str
) -> None:
    headers = {**as_caller(make(max_output=20)), "idempotency-key": "one"}
    refused = http.post(path, json={"model": model, most: 21, **body}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, most)
    smaller = {"model": model, most: 20, **body} | ({} if path == "/v1/tasks" else {"stream": True})
    with http.stream("POST", path, json=smaller, headers=headers) as answer:
        assert answer.is_success, answer.read()


def test_an_output_that_names_no_length_goes_as_far_as_there_is_cache(
    open_door: Open, make: Make, model: str, valkey: Redis
) -> None:
    """The key allows more than the workers have room for."""
    valkey.hset(keys.MODELS, model, json.dumps(json.loads(CARD.to_json()) | {"kv_capacity": 64}))
    headers = as_caller(make(max_output=300))
    made = open_door(auth="keys").http.post("/v1/tasks", json={"model": model, "prompt": [1] * 10}, headers=headers)
    assert made.is_success, made.text
    assert json.loads(valkey.hget(keys.task(made.json()["id"]), "task") or "")["max_tokens"] == 55


def test_a_retry_counts_the_tokens_of_a_text_that_no_gateway_has_seen(
    http: httpx.Client, make: Make, model: str, valkey_url: str, worker: FakeWorker
) -> None:
    with Client(valkey_url) as client:
        text = "a text of some more words than three"
        made = client.submit(model=model, prompt=text, max_tokens=5, tenant="acme").id
    worker.serve(made, ["a"])
    again = f"/v1/tasks/{made}/retry"
    refused = http.post(again, headers=as_caller(make(max_prompt=3)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prompt_too_long")
    assert http.post(again, headers=as_caller(make(max_prompt=100))).status_code == 202
