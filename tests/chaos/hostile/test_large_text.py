"""A key with the smallest limits sends texts that take seconds to tokenize, packed into a few kilobytes."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from tests.chaos.hostile.stage import TENANT, Stage, stage
from tests.producers.gateway.conftest import CARD, TINY

pytestmark = pytest.mark.slow
CALLERS, EACH = 6, 2


@pytest.fixture(scope="module")
def hostile() -> Iterator[Stage]:
    with stage() as made:
        yield made


def boundless(redis: Redis) -> str:
    """Publishes a model like `tiny`, with a tokenizer that drops z: a text's size says nothing of its tokens."""
    drops = {"normalizer": {"type": "Replace", "pattern": {"String": "z"}, "content": ""}}
    data = json.dumps(json.loads((TINY / "tokenizer.json").read_text()) | drops).encode()
    digest = hashlib.sha256(data).hexdigest()
    redis.set(keys.blob(digest), data)
    card = replace(CARD, name="boundless", files=CARD.files | {"tokenizer.json": digest})
    redis.hset(keys.MODELS, card.name, json.dumps({"v": 1, **asdict(card)}))
    return card.name


def packed(model: str, text: str) -> bytes:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return gzip.compress(json.dumps(body).encode())


def attack(hostile: Stage, path: str, body: bytes) -> Counter[Any]:
    """Sends this again and again on some connections. Counts the codes of the answers."""
    headers = {"content-encoding": "gzip", "content-type": "application/json"}

    def send(_: int) -> list[Any]:
        answers = [hostile.http("attacker", "POST", path, content=body, headers=headers) for _ in range(EACH)]
        return [(answer.status_code, answer.json().get("error", {}).get("code")) for answer in answers]

    with ThreadPoolExecutor(CALLERS) as callers:
        return Counter(code for codes in callers.map(send, range(CALLERS)) for code in codes)


def served(hostile: Stage) -> httpx.Response:
    """The victim's short task."""
    body = {"model": CARD.name, "messages": [{"role": "user", "content": "x"}]}
    return hostile.http("victim", "POST", "/v1/tasks", json=body)


def beside(hostile: Stage, path: str, body: bytes) -> Counter[Any]:
    """The answers to an attack. Whoever comes meanwhile is served, and the gateway stays ready."""
    with ThreadPoolExecutor(1) as attacker:
        answers = attacker.submit(attack, hostile, path, body)
        while not answers.done():
            assert served(hostile).status_code == 202
            assert hostile.http(None, "GET", "/readyz").status_code == 200
        return answers.result()


def requests_of(hostile: Stage) -> int:
    """What the attacker's account has counted."""
    name = keys.account(hostile.keys["attacker"].split("_")[1])
    return int(hostile.redis.hget(name, "requests") or 0)


def minute(hostile: Stage) -> int:
    return int(hostile.redis.time()[0]) // 60  # type: ignore[index]


def test_texts_that_no_context_holds_are_refused_by_their_size(hostile: Stage) -> None:
    hostile.key("attacker", scopes=TENANT, rpm=1000)
    answers = beside(hostile, "/v1/chat/completions", packed(CARD.name, "x" * 1_000_000))
    assert answers == {(400, "context_length_exceeded"): CALLERS * EACH}
    assert requests_of(hostile) >= 1, "to unpack and parse it is work"


def test_texts_that_must_be_tokenized_are_counted_and_then_refused_unread(hostile: Stage) -> None:
    model = boundless(hostile.redis)
    hostile.key("attacker", scopes=TENANT, rpm=1)
    begun = minute(hostile)
    answers = beside(hostile, "/v1/chat/completions", packed(model, "x" * 200_000))
    used_up, worked = (429, "rate_limit_exceeded"), (400, "context_length_exceeded")
    assert answers.keys() <= {used_up, worked}
    # In each minute, those that came before the first one was counted: one on each connection.
    assert 1 <= answers[worked] <= CALLERS * (minute(hostile) - begun + 1)
    assert not hostile.redis.exists(f"{keys.TASKS}:attacker")


def test_a_tenant_that_floods_a_tokenizer_waits_for_itself_alone(hostile: Stage) -> None:
    """A key without limits."""
    model = boundless(hostile.redis)
    hostile.key("attacker", scopes=TENANT)
    answers = beside(hostile, "/v1/chat/completions", packed(model, "x" * 200_000))
    assert answers.keys() <= {(400, "context_length_exceeded"), (429, "tokenizer_busy"), (429, "body_busy")}
