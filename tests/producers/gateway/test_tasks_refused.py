"""`/v1/tasks` over real HTTP: what is refused, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from tests.producers.gateway.conftest import CARD, Door, Open, Submit, until


def bad(**fields: Any) -> bytes:
    """A task that would be fine, but for these fields."""
    return json.dumps({"model": CARD.name, "prompt": "def f", **fields}).encode()


#: What is refused by the contract is in tests/producers/contract/test_task.py; here one of each kind.
BAD_BODIES: dict[str, tuple[bytes, int, str, str | None, str]] = {
    # name: body, status, code, param, what the message says
    "unknown model": (bad(model="huge"), 404, "model_not_found", "model", "tiny"),
    "no model": (b'{"prompt": "x"}', 400, "missing_parameter", "model", "model is missing"),
    "empty prompt": (bad(prompt=""), 400, "empty_prompt", "prompt", "empty"),
    "number prompt": (bad(prompt=5), 400, "invalid_type", "prompt", "5"),
    "lone surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "invalid_value", "prompt", "surrogate"),
    "text over the context": (bad(prompt="pass\n" * 2000), 400, "context_length_exceeded", "prompt", "1024"),
    "output over the context": (
        bad(prompt=[5] * 1000, max_tokens=25),
        400,
        "context_length_exceeded",
        "max_tokens",
        "1025 tokens (1000 in the prompt, 25",
    ),
    "unknown token id": (bad(prompt=[2048]), 400, "invalid_value", "prompt", "0 to 2047"),
    "NaN temperature": (bad(temperature=float("nan")), 400, "invalid_value", "temperature", "NaN"),
    "unknown field": (bad(max_token=5), 400, "unknown_parameter", "max_token", "max_tokens"),
    "order without FIFO queues": (bad(order_key="k"), 400, "unsupported_parameter", "order_key", "fifo=1"),
    "order key with a space": (bad(order_key="a b"), 400, "invalid_value", "order_key", "visible ASCII"),
    "a null": (b"null", 400, "invalid_type", None, "not null"),
    "malformed JSON": (b'{"model": "tiny", "prompt": ', 400, "invalid_json", None, "not JSON"),
    "deep nesting": (b"[" * 50_000, 400, "invalid_json", None, "not JSON"),
    "too many parts": (b"[" * 100_000, 400, "too_many_parts", None, "at most 65536"),
    "invalid UTF-8": (b'{"model": "tiny", "prompt": "\xff"}', 400, "invalid_utf8", None, "byte at 29"),
    "too large": (b'{"model": "' + b"x" * (4 << 20) + b'"}', 413, "body_too_large", None, str(4 << 20)),
}


class TestRefused:
    @pytest.mark.parametrize("name", BAD_BODIES)
    def test_bad_input_is_refused_and_leaves_nothing(self, http: httpx.Client, valkey: Redis, name: str) -> None:
        body, status, code, param, says = BAD_BODIES[name]
        before = valkey.dbsize()
        answer = http.post("/v1/tasks", content=body, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
        assert error["type"] == "invalid_request_error"
        assert says in error["message"]
        assert len(error["message"]) < 1000
        assert set(error) == {"message", "type", "param", "code"}
        assert valkey.dbsize() == before

    @pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
    def test_only_json_is_taken(self, http: httpx.Client, valkey: Redis, kind: str | None) -> None:
        before = valkey.dbsize()
        headers = {"content-type": kind} if kind else {}
        answer = http.post("/v1/tasks", content=bad(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert "application/json" in answer.json()["error"]["message"]
        assert valkey.dbsize() == before

    @pytest.mark.parametrize("mebibytes", [5, 40])
    def test_a_large_body_of_unknown_length_is_refused_while_it_is_read(
        self, http: httpx.Client, valkey: Redis, mebibytes: int
    ) -> None:
        before, sent = valkey.dbsize(), 0

        def body() -> Any:
            nonlocal sent
            for _ in range(mebibytes * 16):
                sent += 1
                yield b" " * (1 << 16)

        try:
            answer = http.post("/v1/tasks", content=body(), headers={"content-type": "application/json"})
        except httpx.WriteError:
            assert mebibytes == 40  # beyond all courtesy: the connection was closed on us
            assert sent < mebibytes * 16
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert valkey.dbsize() == before

    def test_a_client_that_leaves_while_it_sends_is_no_fault(
        self, door: Door, http: httpx.Client, valkey: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = valkey.dbsize()
        head = "POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        with caplog.at_level("INFO", "producers.gateway.http.edge"):
            with socket.create_connection(("127.0.0.1", door.port)) as leaving:
                leaving.sendall(head.encode() + b'{"model"')
            until(lambda: caplog.records)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert http.get("/livez").status_code == 200
        assert valkey.dbsize() == before

    def test_the_connection_serves_on_after_a_large_body(self, http: httpx.Client, submit: Submit) -> None:
        body = b"x" * (5 << 20)
        for _ in range(3):
            answer = http.post("/v1/tasks", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 413
        submit()

    def test_a_model_that_generates_nothing_is_refused(self, http: httpx.Client, valkey: Redis) -> None:
        card = {**json.loads(CARD.to_json()), "name": "embedder", "capabilities": ["embed"]}
        valkey.hset(keys.MODELS, "embedder", json.dumps(card))
        answer = http.post("/v1/tasks", json={"model": "embedder", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")

    def test_a_model_whose_tokenizer_is_missing_takes_token_ids_alone(
        self, open_door: Open, valkey: Redis, model: str
    ) -> None:
        http = open_door().http
        valkey.delete(keys.blob(CARD.files["tokenizer.json"]))
        answer = http.post("/v1/tasks", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        assert http.post("/v1/tasks", json={"model": "tiny", "prompt": [5]}).status_code == 202

    def test_a_tokenizer_that_is_not_what_its_hash_says_is_not_used(
        self, open_door: Open, valkey: Redis, model: str
    ) -> None:
        http = open_door().http
        blob = keys.blob(CARD.files["tokenizer.json"])
        right = valkey.get(blob)
        valkey.set(blob, b"{}")
        answer = http.post("/v1/tasks", json={"model": "tiny", "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        valkey.set(blob, right)  # a failed load is not remembered
        assert http.post("/v1/tasks", json={"model": "tiny", "prompt": "x"}).status_code == 202
