"""`/v1/models`: what is in the store."""

from __future__ import annotations

import json

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from tests.producers.gateway.conftest import CARD


def test_models_are_listed_in_openais_shape(http: httpx.Client) -> None:
    assert http.get("/v1/models").json() == {
        "object": "list",
        "data": [
            {
                "id": "tiny",
                "object": "model",
                "created": CARD.created,
                "owned_by": "penstock",
                "version": CARD.version,
                "context_length": 1024,
                "vocab_size": 2048,
                "capabilities": ["generate", "chat"],
                "defaults": CARD.defaults,
            }
        ],
    }


@pytest.mark.parametrize("name", ["small", "org/small", "org/small+3"])
def test_one_model_is_found_by_its_name_whatever_that_is(http: httpx.Client, valkey: Redis, name: str) -> None:
    valkey.hset(keys.MODELS, name, json.dumps({**json.loads(CARD.to_json()), "name": name}))
    assert http.get(f"/v1/models/{name}").json()["id"] == name


def test_an_unknown_model_is_404_and_the_known_ones_are_named(http: httpx.Client) -> None:
    answer = http.get("/v1/models/huge")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "tiny" in answer.json()["error"]["message"]


def test_no_models_are_an_empty_list(http: httpx.Client, valkey: Redis) -> None:
    valkey.delete(keys.MODELS)
    assert http.get("/v1/models").json() == {"object": "list", "data": []}


def test_a_model_that_nobody_serves_is_not_listed_and_a_call_says_what_to_do(http: httpx.Client, valkey: Redis) -> None:
    valkey.hset(keys.MODELS, "gone", json.dumps({**json.loads(CARD.to_json()), "name": "gone", "withdrawn": 1}))
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny"]
    before = valkey.dbsize()
    calls = {
        "/v1/tasks": {"prompt": "x"},
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/responses": {"input": "x"},
    }
    answers = [http.post(path, json={"model": "gone", **body}) for path, body in calls.items()]
    for answer in [*answers, http.get("/v1/models/gone")]:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "`penstock models publish`" in error["message"]
        assert "models here: tiny" in error["message"]
    assert valkey.dbsize() == before, "nothing was written"
