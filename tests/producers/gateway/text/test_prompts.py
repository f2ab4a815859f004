"""Models whose tokenizers are hostile: their callers are told, and nobody else notices."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import Tokenizer
from producers.contract import keys
from producers.gateway.text import prompts
from tests.producers.gateway.conftest import CARD, TINY


@pytest.fixture
def hostile(valkey: Redis, model: str) -> str:
    """Like `tiny`, but the tokenizer's pattern backtracks for as long as the library lets it, and that drops z."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    drops = {"type": "Replace", "pattern": {"String": "z"}, "content": ""}
    changed = {"pre_tokenizer": pattern, "normalizer": drops}
    data = json.dumps(json.loads((TINY / "tokenizer.json").read_text()) | changed).encode()
    digest = hashlib.sha256(data).hexdigest()
    valkey.set(keys.blob(digest), data)
    card = replace(CARD, name="hostile", files=CARD.files | {"tokenizer.json": digest})
    valkey.hset(keys.MODELS, "hostile", json.dumps({"v": 1, **asdict(card)}))
    return "hostile"


def ask(http: httpx.Client, model: str, prompt: str) -> dict[str, Any]:
    answer = http.post("/v1/tasks", json={"model": model, "prompt": prompt})
    error: dict[str, Any] = answer.json().get("error", {"status": answer.status_code})
    return error


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no text that begins with an `a` is encoded."""
    go, encode = threading.Event(), Tokenizer.encode

    def held_up(self: Tokenizer, text: str, *args: Any) -> list[int]:
        if text.startswith("a"):
            go.wait(100)
        return encode(self, text, *args)

    monkeypatch.setattr(Tokenizer, "encode", held_up)
    yield go
    go.set()


def test_other_models_callers_do_not_wait_for_it(
    http: httpx.Client, hostile: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("PATIENCE_S", "LIMIT_S"):
        monkeypatch.setattr(prompts, limit, 100.0)
    assert ask(http, hostile, "b") == {"status": 202}
    assert ask(http, model, "b") == {"status": 202}
    with ThreadPoolExecutor(4) as threads:
        stuck = [threads.submit(ask, http, hostile, "a" * (300 + k) + "!") for k in range(4)]
        for _ in range(10):
            assert ask(http, model, "a" * 300 + "!") == {"status": 202}
        told = [one.result() for one in stuck]
    assert [(one["param"], one["code"]) for one in told] == [("prompt", "invalid_value")] * 4
    assert ask(http, hostile, "b") == {"status": 202}


def test_where_too_many_wait_already_the_next_is_told_to_come_back(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "WAITING", 0)
    answer = http.post("/v1/completions", json={"model": model, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tokenizer_busy")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.usefixtures("go")
def test_one_that_takes_too_long_is_waited_for_no_more(
    http: httpx.Client, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "LIMIT_S", 0.05)
    error = ask(http, hostile, "a")
    assert (error["param"], error["code"]) == ("prompt", "invalid_value")
    assert "within 0.05 s" in error["message"]


def test_the_prompts_of_one_request_wait_once(http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "WAITING", 1)
    text = [f"def f{k}" for k in range(255)]
    answer = http.post("/v1/completions", json={"model": model, "prompt": [*text, "x " * 2000], "max_tokens": 1})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "prompt[255]", "context_length_exceeded")


def test_of_many_prompts_the_one_at_fault_is_named(http: httpx.Client, hostile: str) -> None:
    answer = http.post("/v1/completions", json={"model": hostile, "prompt": ["b", [1, 2], "zz", "c", "z"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt[2]")
    assert error["message"] == "prompt[2] has no token: the model's tokenizer drops all of it"


def test_waiting_for_others_prompts_is_no_fault_of_the_prompt(
    http: httpx.Client, hostile: str, go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slow texts keep both threads: whoever waits for longer than the limit is told to come back, or is served."""
    assert ask(http, hostile, "b") == {"status": 202}
    monkeypatch.setattr(prompts, "LIMIT_S", 0.3)
    with ThreadPoolExecutor(2) as threads:
        stuck = [threads.submit(ask, http, hostile, "a") for _ in range(2)]
        assert ["within 0.3 s" in one.result()["message"] for one in stuck] == [True, True]
    monkeypatch.setattr(prompts, "PATIENCE_S", 0.01)
    answer = http.post("/v1/tasks", json={"model": hostile, "prompt": "b"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "tokenizer_busy")
    assert answer.headers["retry-after"] == "1"
    for limit in ("PATIENCE_S", "LIMIT_S"):
        monkeypatch.setattr(prompts, limit, 100.0)
    go.set()
    assert ask(http, hostile, "b") == {"status": 202}
