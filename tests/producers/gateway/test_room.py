"""How much may wait, against a real broker: what is refused, in which order of tiers, and what the caller is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import keys
from tests.producers.gateway.conftest import QUEUE, Door, until


@pytest.fixture
def post(open_door: Callable[..., Door], model: str) -> Callable[..., httpx.Response]:
    doors: dict[Any, Door] = {}

    def send(bounds: dict[str, int], **fields: Any) -> httpx.Response:
        key = tuple(bounds.items())
        door = doors.get(key) or doors.setdefault(key, open_door(**bounds))
        return httpx.post(f"{door.url}/v1/tasks", json={"model": model, "prompt": [1], **fields}, timeout=60)

    return send


def test_lower_tiers_are_refused_first_and_nothing_of_them_is_written(
    post: Callable[..., httpx.Response], valkey: Redis
) -> None:
    bound = {"max_queued": 20}
    taken = {}
    for tier in ("batch", "flex", "default", "priority"):
        answers = [post(bound, tier=tier).status_code for _ in range(22)]
        taken[tier] = answers.index(429)
        assert set(answers[taken[tier] :]) == {429}
    assert taken == {"batch": 12, "flex": 4, "default": 3, "priority": 20}
    assert len(valkey.keys(keys.task("*"))) == 19 + 20


@pytest.mark.parametrize("tier", keys.TIERS)
def test_however_small_the_bound_one_may_wait_where_nothing_does(
    post: Callable[..., httpx.Response], tier: str
) -> None:
    assert [post({"max_queued": 1}, tier=tier).status_code for _ in range(2)] == [202, 429]


def test_who_is_refused_is_told_when_to_come_again(post: Callable[..., httpx.Response], valkey: Redis) -> None:
    bound = {"max_queued": 1}
    assert post(bound, tier="priority").status_code == 202
    refused = post(bound, tier="priority")
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["x-should-retry"] == "true"
    assert 30_000 <= int(refused.headers["retry-after-ms"]) <= 37_500, "nobody takes anything"
    assert int(refused.headers["retry-after"]) * 1000 >= int(refused.headers["retry-after-ms"])
    valkey.delete(QUEUE, keys.tier_list(QUEUE, "priority"))
    until(lambda: post(bound, tier="priority").status_code == 202)


def test_a_tenant_has_a_bound_of_its_own(post: Callable[..., httpx.Response], valkey: Redis) -> None:
    bound = {"max_queued_per_tenant": 3}
    valkey.zadd(keys.turn(QUEUE, "greedy"), {"1": 1, "2": 2, "3": 3})
    refused = post(bound, tenant="greedy")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tenant_queue_full"
    assert 'of tenant "greedy", 3 may wait' in refused.json()["error"]["message"]
    assert post(bound, tenant="other").status_code == 202
    assert post(bound).status_code == 202
    valkey.zrem(keys.turn(QUEUE, "greedy"), "1")
    until(lambda: post(bound, tenant="greedy").status_code == 202)


def test_openai_endpoints_are_bounded_too(open_door: Callable[..., Door], model: str, valkey: Redis) -> None:
    door = open_door(max_queued=1)
    valkey.lpush(QUEUE, "{}")
    answer = httpx.post(f"{door.url}/v1/completions", json={"model": model, "prompt": "x"}, timeout=60)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert not valkey.exists(keys.READERS)


@pytest.mark.parametrize("bound", [{"max_queued": 2}, {"max_queued_per_tenant": 2}])
def test_more_prompts_than_may_ever_wait_are_the_callers_fault(
    open_door: Callable[..., Door], model: str, valkey: Redis, bound: dict[str, int]
) -> None:
    body = {"model": model, "prompt": ["x", "y", "z"], "service_tier": "priority"}
    answer = httpx.post(f"{open_door(**bound).url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "array_above_max_length"
    assert "send 2 at a time" in answer.json()["error"]["message"]
    assert "x-should-retry" not in answer.headers
    assert not valkey.keys(keys.task("*"))
