"""A minute's requests: work that is refused counts, what is used up costs no more work, and a replay costs none."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis

from engine.text import Tokenizer
from producers.contract import keys
from producers.store.access.api_keys import Limits
from tests.producers.gateway.conftest import Make, Open, until
from tests.producers.gateway.test_key_limits import within_a_minute
from tests.producers.gateway.test_keys import as_caller, change, door, make

__all__ = ["door", "make"]

LONG = "def f(x): return x\n" * 400  # more than tiny's context, which its size does not tell
CHAT = {"messages": [{"role": "user", "content": LONG}]}
Send = Callable[..., httpx.Response]


@pytest.fixture
def send(http: httpx.Client, model: str) -> Send:
    def post(path: str, body: dict[str, Any], headers: dict[str, str], url: str = "") -> httpx.Response:
        return http.post(f"{url}/v1/{path}", json={"model": model, **body}, headers=headers)

    return post


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were tokenized."""
    texts: list[str] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *args: Any) -> list[int]:
        texts.append(text)
        return encode(self, text, *args)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    return texts


def code(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]


def counted(valkey: Redis) -> list[int]:
    return sorted(int(valkey.hget(name, "requests") or 0) for name in valkey.keys(keys.account("*")))


USED_UP = (429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", CHAT),
        ("completions", {"prompt": LONG}),
        ("responses", {"input": LONG}),
        ("tasks", {"prompt": LONG}),
        ("tasks", CHAT),
    ],
)
def test_what_is_refused_after_work_counts_and_what_is_refused_before_it_does_not(
    send: Send, make: Make, valkey: Redis, path: str, body: dict[str, Any]
) -> None:
    def ask() -> tuple[list[tuple[int, str | None]], list[int], httpx.Response]:
        valkey.delete(*valkey.keys(keys.account("*")), "none")
        headers = as_caller(make(rpm=2))
        answers = [send(path, {"temperature": -1, **body}, headers)]
        answers += [send(path, body, headers) for _ in range(2)]
        return [code(answer) for answer in answers], counted(valkey), send(path, body, headers)

    before, requests, refused = within_a_minute(valkey, ask)
    assert before == [(400, "invalid_value"), *[(400, "context_length_exceeded")] * 2]
    assert requests == [2]
    assert code(refused) == USED_UP
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-should-retry"] == "true"


def test_to_count_the_tokens_of_a_large_body_counts(http: httpx.Client, make: Make, valkey: Redis, model: str) -> None:
    small = json.dumps({"model": model, "input": "x"})

    def ask() -> tuple[list[tuple[int, str | None]], list[int]]:
        valkey.delete(*valkey.keys(keys.account("*")), "none")
        headers = as_caller(make(rpm=2)) | {"content-type": "application/json"}
        bodies = (small, small + " " * 70_000, small, small + " " * 70_000, small + " " * 70_000, small)
        answers = [http.post("/v1/responses/input_tokens", content=body, headers=headers) for body in bodies[:4]]
        requests = counted(valkey)
        answers += [http.post("/v1/responses/input_tokens", content=body, headers=headers) for body in bodies[4:]]
        return [code(answer) for answer in answers], requests

    answers, requests = within_a_minute(valkey, ask)
    assert answers == [(200, None)] * 4 + [USED_UP, (200, None)]
    assert requests == [2]


def test_whoever_has_used_up_a_minute_is_refused_before_the_body_is_read(
    http: httpx.Client, send: Send, make: Make, valkey: Redis, model: str, encoded: list[str]
) -> None:
    """Neither parsed nor tokenized, and the store is not asked."""

    def ask() -> tuple[list[httpx.Response], int]:
        headers = as_caller(make(rpm=1))
        assert send("tasks", {"prompt": "x"}, headers).status_code == 202
        send("tasks", {"prompt": "x"}, headers)
        encoded.clear()
        admits = [_scripts(valkey)]
        answers = [http.post("/v1/tasks", content=b"[" * 9, headers=headers)]
        packed = {**headers, "content-encoding": "gzip", "content-type": "application/json"}
        bomb = gzip.compress(
            json.dumps({"model": model, "messages": [{"role": "user", "content": "x" * 10**6}]}).encode()
        )
        answers += [
            http.post(f"/v1/{path}", content=bomb, headers=packed) for path in ("chat/completions", "responses")
        ]
        return answers, _scripts(valkey) - admits[0]

    answers, scripts = within_a_minute(valkey, ask)
    assert [code(answer) for answer in answers] == [USED_UP] * 3
    assert (encoded, scripts) == ([], 0)


def _scripts(valkey: Redis) -> int:
    stats: Any = valkey.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))


def test_a_tenants_minute_is_told_to_each_of_its_keys_at_every_gateway(
    open_door: Open, send: Send, make: Make, valkey: Redis
) -> None:
    other = open_door(auth="keys").url
    tenants = (f"acme-{k}" for k in itertools.count())  # gateways remember who has used up a minute, until it ends

    def ask() -> list[tuple[int, str | None]]:
        tenant = next(tenants)
        valkey.hset(keys.TENANT_LIMITS, tenant, json.dumps({"rpm": 3}))
        one, two = as_caller(make(tenant, rpm=9)), as_caller(make(tenant))
        found = [send("tasks", {"prompt": LONG}, one), send("tasks", {"prompt": LONG}, two, other)]
        found += [send("tasks", {"prompt": [1]}, one), send("tasks", {"prompt": [1]}, two)]
        found += [send("tasks", {"prompt": [1]}, two, other), send("tasks", {"prompt": [1]}, as_caller(make("free")))]
        return [code(answer) for answer in found]

    long = (400, "context_length_exceeded")
    assert within_a_minute(valkey, ask) == [long, long, (202, None), USED_UP, USED_UP, (202, None)]


def test_a_raised_limit_lets_in_at_once(send: Send, make: Make, valkey: Redis) -> None:
    token = make(rpm=1)
    headers = as_caller(token)
    until(lambda: code(send("tasks", {"prompt": [1]}, headers)) == USED_UP)
    change(valkey, token, lambda key: replace(key, limits=Limits(rpm=10**6)))
    until(lambda: send("tasks", {"prompt": [1]}, headers).status_code == 202)


def test_work_that_a_limit_or_a_full_queue_refuses_counts_and_token_ids_are_no_work(
    open_door: Open, make: Make, model: str, valkey: Redis
) -> None:
    door = open_door(auth="keys", max_queued_per_tenant=1)

    def ask(token: str, prompt: Any) -> tuple[int, str | None]:
        body = {"model": model, "prompt": prompt}
        return code(door.http.post("/v1/tasks", json=body, headers=as_caller(token)))

    def both() -> tuple[list[tuple[int, str | None]], list[int]]:
        valkey.delete(*valkey.keys(keys.account("*")), *valkey.keys("penstock:waiting*"), "none")
        one, two = make(rpm=9, max_in_flight=1), make("other", rpm=9)
        answers = [ask(token, prompt) for token in (one, two) for prompt in ("x", "x", [1])]
        return answers, counted(valkey)

    answers, requests = within_a_minute(valkey, both)
    busy, full = (429, "too_many_in_flight"), (429, "tenant_queue_full")
    assert answers[0] == answers[3] == (202, None)
    assert answers[1] in (busy, full)
    assert answers[4:] == [full, full]
    assert requests == [2, 2]


@pytest.mark.parametrize("path", ["tasks", "chat/completions", "completions", "responses"])
def test_a_replay_is_charged_no_more_and_tokenizes_nothing(
    http: httpx.Client, send: Send, make: Make, valkey: Redis, path: str, encoded: list[str], model: str
) -> None:
    body: dict[str, Any] = {
        "tasks": {"prompt": "def f"},
        "completions": {"prompt": ["def f", "def g"], "stream": True, "echo": False},
        "chat/completions": {"messages": [{"role": "user", "content": "x"}], "stream": True},
        "responses": {"input": "x", "background": True},
    }[path]
    count = 2 if path == "completions" else 1

    def begin(headers: dict[str, str]) -> tuple[int, str | None]:
        with http.stream("POST", f"/v1/{path}", json={"model": model, **body}, headers=headers) as answer:
            return answer.status_code, answer.headers.get("idempotent-replayed")

    def ask() -> tuple[list[Any], list[str]]:
        valkey.delete(*valkey.keys(keys.account("*")), "none")
        headers = as_caller(make(rpm=count))
        key = {"idempotency-key": "one"}
        found: list[Any] = [begin({**headers, **key})]
        assert code(send(path, body, headers)) == USED_UP
        encoded.clear()
        found += [begin({**headers, **key}) for _ in range(2)]
        texts = [*encoded]
        other = send(path, {**body, "metadata": {"a": "b"}}, {**headers, **key})
        found += [code(other), code(send(path, body, {**headers, "idempotency-key": "two"})), counted(valkey)]
        for name in valkey.keys("penstock:idempotency:*"):
            valkey.delete(name)
        return found, texts

    found, texts = within_a_minute(valkey, ask)
    made = 202 if path == "tasks" else 200
    assert found[:3] == [(made, None), (made, "true"), (made, "true")]
    assert found[3:] == [(422, "idempotency_key_reused"), USED_UP, [count]]
    assert texts == []
