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
from producers import Client
from producers.client import directory
from producers.contract import keys
from producers.gateway.text.prompts import Prompts
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, TINY, Door, Open
from tests.producers.gateway.openai.conftest import Answering, says
from tests.producers.gateway.openai.conftest import answering as answering
from tests.waiting import PATIENCE_S

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
    with httpx.stream("POST", f"{door.url}{path}", json={"model": CARD.name, **body}, timeout=PATIENCE_S) as answer:
        return answer.status_code


def test_a_prompt_is_made_by_the_version_that_gets_it(
    open_door: Open, model: str, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "FRESH_S", 0.01)
    monkeypatch.setattr(directory, "PREPARED_S", PATIENCE_S)
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
    monkeypatch.setattr(directory, "FRESH_S", 0.01)
    monkeypatch.setattr(directory, "PREPARED_S", 0.0)
    other, door = renumbered(valkey), open_door()

    async def switch() -> None:
        valkey.hset(keys.MODELS, model, other.to_json())
        await asyncio.sleep(0.05)

    encoding(monkeypatch, switch)
    path, body = ASKED[kind]
    answer = httpx.post(f"{door.url}{path}", json={"model": model, **body}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_changed")
    assert "retry-after" in answer.headers
    assert list(valkey.scan_iter(keys.task("*"))) == []


# ---- what is run or answered again after a rollout -------------------------------------------------------------------


@pytest.fixture
def rolled_out(valkey: Redis, model: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModelCard], None]:
    """Publishes a version, which gateways see at once."""
    monkeypatch.setattr(directory, "FRESH_S", 0.0)
    return lambda card: valkey.hset(keys.MODELS, card.name, card.to_json()) and None


def same_tokenizer() -> ModelCard:
    """A version with other weights: other defaults, too."""
    return replace(CARD, version="e" * len(CARD.version), files={**CARD.files, "generation_config.json": "0" * 64})


def ended(http: httpx.Client, worker: FakeWorker, **fields: Any) -> str:
    task_id: str = http.post("/v1/tasks", json={"model": CARD.name, **fields}).json()["id"]
    worker.serve(task_id, ["x"])
    return task_id


@pytest.mark.parametrize("fields", [{"prompt": TEXT}, {"prompt": [5], "logit_bias": {"7": 1}}], ids=["text", "ids"])
def test_a_retry_gives_no_version_the_token_ids_of_another_tokenizer(
    http: httpx.Client, worker: FakeWorker, valkey: Redis, rolled_out: Callable[[ModelCard], None], fields: Any
) -> None:
    task_id = ended(http, worker, **fields)
    other, headers = renumbered(valkey), {"idempotency-key": "again"}
    rolled_out(other)
    count = len(list(valkey.scan_iter(keys.task("*"))))
    for more in ({}, {"headers": headers}):
        answer = http.post(f"/v1/tasks/{task_id}/retry", **more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "tokenizer_changed")
        assert (answer.headers["x-should-retry"], task_id in answer.json()["error"]["message"]) == ("false", True)
    assert len(list(valkey.scan_iter(keys.task("*")))) == count
    rolled_out(CARD)
    again = http.post(f"/v1/tasks/{task_id}/retry", headers=headers)
    assert again.status_code == 202
    rolled_out(other)
    repeated = http.post(f"/v1/tasks/{task_id}/retry", headers=headers)
    assert repeated.json()["id"] == again.json()["id"], "it was made when the version could read it"


@pytest.mark.parametrize("encoding", [True, False], ids=["this release", "an earlier one"])
def test_a_retry_takes_the_token_ids_to_a_version_with_the_same_tokenizer(
    http: httpx.Client,
    worker: FakeWorker,
    valkey: Redis,
    rolled_out: Callable[[ModelCard], None],
    encoding: bool,
) -> None:
    """Of a task of an earlier release nothing says by which tokenizer, so that it needs the same version."""
    task_id, version = ended(http, worker, prompt=TEXT), same_tokenizer()
    if not encoding:
        valkey.hdel(keys.task(task_id), "encoding")
    rolled_out(version)
    answer = http.post(f"/v1/tasks/{task_id}/retry")
    assert answer.status_code == (202 if encoding else 409)
    if encoding:
        before, after = (valkey.hgetall(keys.task(name)) for name in (task_id, answer.json()["id"]))
        assert (after[b"version"].decode(), after[b"task"]) == (version.version, before[b"task"])
    rolled_out(CARD)
    assert http.post(f"/v1/tasks/{task_id}/retry").status_code == 202


def test_a_task_with_text_is_encoded_anew(
    http: httpx.Client, worker: FakeWorker, valkey: Redis, valkey_url: str, rolled_out: Callable[[ModelCard], None]
) -> None:
    with Client(valkey_url) as client:
        task_id = client.submit(model=CARD.name, prompt=TEXT).id
    worker.serve(task_id, ["x"])
    other = renumbered(valkey)
    rolled_out(other)
    again = http.post(f"/v1/tasks/{task_id}/retry").json()["id"]
    assert valkey.hget(keys.task(again), "version") == other.version.encode()
    assert valkey.hget(keys.task(again), "encoding") != valkey.hget(keys.task(task_id), "encoding")


@pytest.mark.parametrize("kind", ASKED)
def test_a_request_that_is_repeated_after_a_rollout_gets_its_first_answer(
    http: httpx.Client, answering: Answering, valkey: Redis, rolled_out: Callable[[ModelCard], None], kind: str
) -> None:
    path, body = ASKED[kind]
    body, headers = {"model": CARD.name, **body, "stream": False}, {"idempotency-key": kind[-4:]}
    if path == "/v1/tasks":
        del body["stream"]
    first = http.post(path, json=body, headers=headers)
    made = sorted(valkey.keys(keys.task("*")))
    rolled_out(renumbered(valkey))
    again = http.post(path, json=body, headers=headers)
    assert (first.is_success, again.status_code) == (True, first.status_code), again.text
    assert again.headers.get("idempotent-replayed") == "true"
    assert again.json()["id"] == first.json()["id"]
    assert sorted(valkey.keys(keys.task("*"))) == made


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/chat/completions", {"logprobs": True}), ("/v1/completions", {"logprobs": 0})]
)
def test_the_log_probabilities_of_an_earlier_answer_are_not_spelled_by_another_tokenizer(
    http: httpx.Client,
    answering: Answering,
    valkey: Redis,
    rolled_out: Callable[[ModelCard], None],
    path: str,
    more: Any,
) -> None:
    answering.scripts = [says("x", logprobs=[(-0.5, ((5, -0.5),))])]
    asked = {"messages": [{"role": "user", "content": TEXT}]} if "chat" in path else {"prompt": TEXT}
    body, headers = {"model": CARD.name, **asked, **more}, {"idempotency-key": "k"}
    first = http.post(path, json=body, headers=headers)
    assert first.status_code == 200
    rolled_out(same_tokenizer())
    assert http.post(path, json=body, headers=headers).json()["choices"] == first.json()["choices"]
    rolled_out(renumbered(valkey))
    again = http.post(path, json=body, headers=headers)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "tokenizer_changed")
