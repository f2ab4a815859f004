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
from engine.text.confined_tokenizer import ConfinedTokenizer
from producers.contract import keys
from producers.gateway.text import prompts
from producers.gateway.text.prompts import KEPT_LARGE
from tests.producers.gateway.conftest import CARD, TINY, Door, until
from tests.waiting import PATIENCE_S


@pytest.fixture
def hostile(valkey: Redis, model: str) -> str:
    """Like `tiny`, but the tokenizer's pattern backtracks for as long as the library lets it, and that drops z."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    return published(valkey, "hostile", {"pre_tokenizer": pattern, "normalizer": dropping("z")})


def dropping(letter: str) -> dict[str, Any]:
    """A normalizer with which a text's size says nothing of its tokens."""
    return {"type": "Replace", "pattern": {"String": letter}, "content": ""}


def published(valkey: Redis, name: str, changed: dict[str, Any]) -> str:
    """A model like `tiny`, but for its tokenizer."""
    data = json.dumps(json.loads((TINY / "tokenizer.json").read_text()) | changed).encode()
    digest = hashlib.sha256(data).hexdigest()
    valkey.set(keys.blob(digest), data)
    card = replace(CARD, name=name, files=CARD.files | {"tokenizer.json": digest})
    valkey.hset(keys.MODELS, name, json.dumps({"v": 1, **asdict(card)}))
    return name


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
            go.wait(PATIENCE_S)
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


class TestLargeTextsOfManyModels:
    """Their tokenizers are in processes, of which there are few."""

    @pytest.fixture
    def models(self, valkey: Redis, model: str, request: pytest.FixtureRequest) -> list[str]:
        """Each test's own: the gateway, which all share, keeps processes of the test before."""
        words = [f"{request.function.__name__}-{letter}" for letter in "wxyz"]
        return [published(valkey, word, {"normalizer": dropping(word)}) for word in words]

    def test_no_more_processes_work_than_are_kept(
        self, door: Door, models: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go, begun = threading.Event(), threading.Semaphore(0)

        def held_up(*_: Any) -> list[tuple[int, ...]]:
            begun.release()
            go.wait(PATIENCE_S)
            return [(1,)]

        monkeypatch.setattr(ConfinedTokenizer, "encode_all", held_up)
        with ThreadPoolExecutor(len(models)) as threads:
            waiting = [threads.submit(ask, door.http, model, "b" * 70_000) for model in models]
            assert all(begun.acquire(timeout=PATIENCE_S) for _ in range(KEPT_LARGE))
            executor = door.app.state.gateway.prompts._large._executor
            assert until(lambda: executor.waiting == len(models))
            more = begun.acquire(blocking=False)
            go.set()
            assert [one.result() for one in waiting] == [{"status": 202}] * len(models)
        assert not more, "a third process"

    def test_a_tenant_that_goes_from_model_to_model_ends_the_processes_that_it_started_itself(
        self, http: httpx.Client, models: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = list[ConfinedTokenizer]()
        monkeypatch.setattr(ConfinedTokenizer, "encode_all", lambda self, *_: used.append(self) or [(1,)])

        def ask_as(tenant: str, model: str) -> ConfinedTokenizer:
            body = {"model": model, "prompt": "b" * 70_000}
            assert http.post("/v1/tasks", json=body, headers={"penstock-tenant": tenant}).status_code == 202
            return used[-1]

        first = ask_as("victim", models[0])
        for model in (*models[1:], *models):
            ask_as("attacker", model)
        assert ask_as("victim", models[0]) is first
        assert len(set(used)) == len(models) * 2 - 1
