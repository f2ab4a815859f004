"""What is too large whatever its tokens are is refused before any of it is rendered or tokenized, at every endpoint."""

from __future__ import annotations

import gzip
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import ConfinedTemplate, Tokenizer
from engine.text.confined_tokenizer import ConfinedTokenizer
from producers.contract import keys
from producers.contract.chat import MAX_MESSAGES
from producers.gateway.openai.responses.request import Item
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Make, Open
from tests.producers.gateway.test_keys import as_caller, make
from tests.producers.gateway.text.test_prompts import hostile
from tests.waiting import PATIENCE_S

__all__ = ["hostile", "make"]

ENDPOINTS = ["chat/completions", "completions", "responses", "tasks", "tasks with messages"]


def body_of(endpoint: str, text: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    match endpoint:
        case "completions" | "tasks":
            return endpoint, {"prompt": text}
        case "responses":
            return endpoint, {"input": text}
    return endpoint.removesuffix(" with messages"), {"messages": messages}


def ask(http: httpx.Client, model: str, path: str, **body: Any) -> tuple[int, Any, str]:
    """The answer to a packed body: status, error code and message."""
    packed = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = http.post(
        f"/v1/{path}", content=gzip.compress(json.dumps({"model": model, **body}).encode()), headers=packed
    )
    error = answer.json().get("error") or {"code": None, "message": ""}
    return answer.status_code, error["code"], error["message"]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be tokenized."""

    def unexpected(*_: Any) -> None:
        raise AssertionError("this text is not to be tokenized")

    monkeypatch.setattr(Tokenizer, "encode", unexpected)
    monkeypatch.setattr(ConfinedTokenizer, "encode_all", unexpected)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_text_that_must_exceed_the_context_is_not_tokenized(http: httpx.Client, model: str, endpoint: str) -> None:
    path, body = body_of(endpoint, "x" * 900_000)
    status, code, message = ask(http, model, path, **body)
    assert (status, code) == (400, "context_length_exceeded")
    assert message.startswith("This model's maximum context length is 1024 tokens. However, you requested at least 219")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_text_that_must_exceed_the_keys_largest_prompt_is_not_tokenized(
    open_door: Open, make: Make, model: str, endpoint: str
) -> None:
    path, body = body_of(endpoint, "x" * 6000)
    gateway = open_door(auth="keys")
    gateway.http.headers.update(as_caller(make(max_prompt=100)))
    status, code, message = ask(gateway.http, model, path, **body)
    assert (status, code) == (400, "prompt_too_long")
    assert "may have 100" in message


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_no_request_has_more_than_a_mebibyte_of_text_whatever_its_tokenizer_drops(
    http: httpx.Client, hostile: str, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setattr(
        ConfinedTemplate, "render", lambda *_, **__: pytest.fail("these messages are not to be rendered")
    )
    path, body = body_of(endpoint, "z" * (4_000_000))
    status, code, message = ask(http, hostile, path, **body)
    assert (status, code) == (400, "invalid_value")
    assert "at most 1048576" in message


@pytest.mark.parametrize("path", ["chat/completions", "responses", "tasks"])
def test_no_request_has_more_messages_than_there_may_be(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(
        ConfinedTemplate, "render", lambda *_, **__: pytest.fail("these messages are not to be rendered")
    )
    messages = [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)
    status, code, message = ask(http, model, path, **{"input" if path == "responses" else "messages": messages})
    assert (status, code) == (400, "array_above_max_length")
    assert f"has {MAX_MESSAGES + 1} messages; at most {MAX_MESSAGES} are taken" in message


@pytest.mark.parametrize("items", [[("user", "x" * 300_000)] * 4, [("user", "x")] * (MAX_MESSAGES + 9)])
def test_a_conversation_counts_with_all_that_went_before_and_is_cut_by_its_size_where_it_may_be(
    http: httpx.Client, model: str, valkey: Redis, worker: FakeWorker, items: list[tuple[str, str]]
) -> None:
    made = http.post("/v1/responses", json={"model": model, "input": "a", "background": True}).json()["id"]
    task = made.removeprefix("resp_")
    worker.serve(task, ["b"])
    kept = json.loads(valkey.hget(keys.task(task), "response"))
    kept["items"] = [Item.new(role, text).kept for role, text in items]
    valkey.hset(keys.task(task), "response", json.dumps(kept))
    status, code, _ = ask(http, model, "responses", input="c", previous_response_id=made, background=True)
    assert (status, code) in ((400, "invalid_value"), (400, "array_above_max_length"))
    rendered: list[int] = []
    render = ConfinedTemplate.render

    def noted(self: ConfinedTemplate, messages: Any, **more: Any) -> str:
        rendered.append(len(messages))
        return render(self, messages, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfinedTemplate, "render", noted)
        cut = {"input": "c", "previous_response_id": made, "background": True, "truncation": "auto"}
        assert ask(http, model, "responses", **cut)[:2] == (200, None)
    assert 0 < max(rendered) <= MAX_MESSAGES


def test_no_small_request_waits_for_a_large_one(
    http: httpx.Client, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, large = threading.Event(), threading.Semaphore(0)
    encode, render = ConfinedTokenizer.encode_all, ConfinedTemplate.render

    def held_text(self: ConfinedTokenizer, *args: Any) -> list[tuple[int, ...]]:
        large.release()
        go.wait(PATIENCE_S)
        return encode(self, *args)

    def held_chat(self: ConfinedTemplate, messages: Any, **more: Any) -> str:
        if len(messages) > 1:
            large.release()
            go.wait(PATIENCE_S)
        return render(self, messages, **more)

    monkeypatch.setattr(ConfinedTokenizer, "encode_all", held_text)
    monkeypatch.setattr(ConfinedTemplate, "render", held_chat)
    monkeypatch.setattr("producers.gateway.text.prompts.Prompts._check_sizes", _unchecked)
    chat, small = [{"role": "user", "content": "x"}] * 300, {"messages": [{"role": "user", "content": "x"}]}
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(ask, http, model, "tasks", prompt="x " * 40_000) for _ in range(2)]
        waiting += [threads.submit(ask, http, model, "tasks", messages=chat) for _ in range(2)]
        for _ in range(2):
            assert large.acquire(timeout=PATIENCE_S)
        assert ask(http, model, "tasks", **small) == (202, None, "")
        assert ask(http, model, "tasks", prompt="x") == (202, None, "")
        assert not any(one.done() for one in waiting)
        go.set()
        assert {one.result()[1] for one in waiting} == {"context_length_exceeded"}


async def _unchecked(*_: Any) -> None:
    """As where a text's size says nothing of its tokens."""


def test_a_large_text_that_is_ended_is_its_callers_error_and_the_next_one_is_read(
    http: httpx.Client, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, much = ConfinedTokenizer.encode_all, ["b" * 100_000] * 40

    def killed(self: ConfinedTokenizer, texts: Any, special: bool) -> list[tuple[int, ...]]:
        monkeypatch.setattr(ConfinedTokenizer, "encode_all", encode)
        over = threading.Event()
        threading.Thread(target=lambda: [self.kill() for _ in iter(lambda: over.wait(0.001), True)]).start()
        try:
            return encode(self, much, special)
        finally:
            over.set()

    monkeypatch.setattr(ConfinedTokenizer, "encode_all", killed)
    status, code, message = ask(http, hostile, "tasks", prompt="b" * 70_000)
    assert (status, code) == (400, "tokenizer_stopped")
    assert re.search("tokenizer was stopped on the prompt: (its process ended with status -9|it was killed)", message)
    assert ask(http, hostile, "tasks", prompt="b" * 70_000)[1] == "context_length_exceeded"


def test_a_large_text_is_ended_when_its_caller_leaves(
    http: httpx.Client, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, killed = threading.Event(), threading.Event()

    def held(*_: Any) -> list[tuple[int, ...]]:
        began.set()
        killed.wait(PATIENCE_S)
        return [(1,)]

    monkeypatch.setattr(ConfinedTokenizer, "encode_all", held)
    monkeypatch.setattr(ConfinedTokenizer, "kill", lambda _: killed.set())
    body = {"model": hostile, "prompt": "b" * 70_000}
    with httpx.Client(base_url=http.base_url, timeout=PATIENCE_S) as leaving, ThreadPoolExecutor(1) as threads:
        request = threads.submit(leaving.post, "/v1/tasks", json=body)
        assert began.wait(PATIENCE_S)
        for link in leaving._transport._pool.connections:  # type: ignore[attr-defined]
            link._connection._network_stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        assert killed.wait(PATIENCE_S)
        assert isinstance(request.exception(PATIENCE_S), httpx.TransportError)
