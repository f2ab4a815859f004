"""A request's prompt is made by the version that gets it, whenever a rollout switches."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest
from redis import Redis

from engine.text import ModelCard
from producers.client import submission
from producers.contract import keys
from producers.gateway.text.prompts import Prompts
from tests.producers.gateway.conftest import CARD, TINY, Door, Open

TEXT: Final = "def f(x):"
#: Requests whose prompts are text.
ASKED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "a task": ("/v1/tasks", {"prompt": TEXT}),
    "messages": ("/v1/tasks", {"messages": [{"role": "user", "content": TEXT}]}),
    "a completion": ("/v1/completions", {"prompt": TEXT, "stream": True}),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "stream": True}),
    "a response": ("/v1/responses", {"input": TEXT, "background": True}),
}


def renumbered(valkey: Redis) -> ModelCard:
    """A second version of `tiny`, published: its tokenizer gives the same tokens other ids."""
    raw = ModelCard.tokenizer_files(TINY)["tokenizer.json"]
    tokenizer = json.loads(raw)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    names = [name for name in vocabulary if name not in special]
    ids = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, reversed(ids), strict=True))
    data = json.dumps(tokenizer).encode()
    digest = hashlib.sha256(data).hexdigest()
    valkey.set(keys.blob(digest), data)
    return replace(CARD, version="f" * len(CARD.version), files={**CARD.files, "tokenizer.json": digest})


@contextmanager
def switching(valkey: Redis, *cards: ModelCard) -> Iterator[None]:
    """Switch from version to version, again and again."""
    over = threading.Event()

    def switch() -> None:
        while not over.is_set():
            for card in cards:
                valkey.hset(keys.MODELS, card.name, card.to_json())
                over.wait(0.03)

    thread = threading.Thread(target=switch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def encoding(patch: pytest.MonkeyPatch, then: Callable[[], Awaitable[None]]) -> None:
    """Have something happen each time that a prompt was made."""
    for name in ("encode", "encode_all"):
        encode = getattr(Prompts, name)

        async def encoded(*arguments: Any, encode: Any = encode, **more: Any) -> Any:
            ids = await encode(*arguments, **more)
            await then()
            return ids

        patch.setattr(Prompts, name, encoded)


def submit(door: Door, kind: str) -> int:
    path, body = ASKED[kind]
    with httpx.stream("POST", f"{door.url}{path}", json={"model": CARD.name, **body}, timeout=60) as answer:
        return answer.status_code


def test_a_prompt_is_made_by_the_version_that_gets_it(
    open_door: Open, model: str, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "FRESH_S", 0.01)
    encoding(monkeypatch, lambda: asyncio.sleep(0.05))
    other, door = renumbered(valkey), open_door()
    with switching(valkey, CARD, other), ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda kind: submit(door, kind), [*ASKED] * 16))
    assert {status // 100 for status in statuses} == {2}
    records = [valkey.hgetall(key) for key in valkey.scan_iter(keys.task("*"))]
    prompts: dict[tuple[int, ...], set[str]] = {}
    for record in records:
        version = record[b"version"].decode()
        assert record[b"queue"].decode() == keys.version_queue(model, version)
        prompts.setdefault(tuple(json.loads(record[b"task"])["prompt"]), set()).add(version)
    assert len(records) == len(statuses)
    assert all(len(versions) == 1 for versions in prompts.values()), "each version has ids of its own"
    assert set.union(*prompts.values()) == {CARD.version, other.version}


@pytest.mark.parametrize("kind", ASKED)
def test_a_prompt_that_took_too_long_to_make_for_a_version_that_is_gone_is_not_queued(
    open_door: Open, model: str, valkey: Redis, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(submission, "FRESH_S", 0.01)
    monkeypatch.setattr(submission, "PREPARED_S", 0.0)
    other, door = renumbered(valkey), open_door()

    async def switch() -> None:
        valkey.hset(keys.MODELS, model, other.to_json())
        await asyncio.sleep(0.05)

    encoding(monkeypatch, switch)
    path, body = ASKED[kind]
    answer = httpx.post(f"{door.url}{path}", json={"model": model, **body}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_changed")
    assert "retry-after" in answer.headers
    assert list(valkey.scan_iter(keys.task("*"))) == []
