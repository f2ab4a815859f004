"""How much may wait, against a real broker: what is refused, in which order of tiers, and what the caller is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.client.aio import AsyncClient
from producers.contract import keys
from producers.contract.message import Message
from producers.contract.task import Task
from producers.gateway.admission import limits
from producers.gateway.admission.limits import Admission
from producers.gateway.http.errors import Problem
from producers.store.access.principal import LOCAL
from tests.producers.gateway.conftest import POOL, QUEUE, Door, until

LIST = broker_keys.tier_list(QUEUE, "priority")


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
    valkey.delete(QUEUE, broker_keys.tier_list(QUEUE, "priority"))
    until(lambda: post(bound, tier="priority").status_code == 202)


def test_a_tenant_has_a_bound_of_its_own(post: Callable[..., httpx.Response], valkey: Redis) -> None:
    bound = {"max_queued_per_tenant": 3}
    valkey.zadd(broker_keys.turn(QUEUE, "greedy"), {"1": 1, "2": 2, "3": 3})
    refused = post(bound, tenant="greedy")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tenant_queue_full"
    assert 'of tenant "greedy", 3 may wait' in refused.json()["error"]["message"]
    assert post(bound, tenant="other").status_code == 202
    assert post(bound).status_code == 202
    valkey.zrem(broker_keys.turn(QUEUE, "greedy"), "1")
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


def test_a_burst_on_an_idle_system_is_told_of_seconds_and_not_of_half_a_minute(
    post: Callable[..., httpx.Response], valkey: Redis
) -> None:
    """Nothing was seen of its workers yet; each who is refused is told of the places of those before, too."""
    valkey.hset(broker_keys.INCARNATIONS, "w.1", POOL.queue)
    bound = {"max_queued": 20}
    refused = [one for one in [post(bound) for _ in range(40)] if one.status_code == 429]
    assert len(refused) == 40 - 19
    waits = [int(one.headers["retry-after-ms"]) for one in refused]
    assert waits[0] < 1_000
    assert max(waits) < 10_000


@pytest.mark.parametrize("tokens", [5_000, 20_000])
def test_the_wait_is_that_of_the_queued_tokens(
    post: Callable[..., httpx.Response], model: str, valkey: Redis, tokens: int
) -> None:
    """By the size of the tasks that are next, not of the one that is refused; at the speed to begin with."""
    valkey.hset(broker_keys.INCARNATIONS, "w.1", POOL.queue)
    valkey.lpush(LIST, Message("a", QUEUE, "priority", 1, tokens).envelope())
    refused = post({"max_queued": 1}, tier="priority", max_tokens=1)
    wait = tokens / limits.USUAL_RATE
    assert wait <= int(refused.headers["retry-after-ms"]) / 1000 <= 1.25 * wait


async def test_the_rate_is_that_of_time_in_which_tasks_waited(
    valkey: Redis, valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour without work makes nobody wait longer; workers that get slower do."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.now))
    valkey.hset(broker_keys.INCARNATIONS, "w.1", POOL.queue)
    async with AsyncClient(valkey_url) as client:
        bounds = Admission(client, 1, None)
        task = [Task(model=model, prompt=[1], tier="priority")]

        async def look(after_s: float, taken: int, waiting: int = 1) -> float | None:
            """When to come again, s; None where the task was let in."""
            clock.now += after_s
            valkey.incrby(broker_keys.DELIVERED_TOKENS, taken * task[0].kv_tokens(2048))
            valkey.delete(LIST)
            if waiting:
                valkey.lpush(LIST, *["{}"] * waiting)
            try:
                await bounds.enter(LOCAL, task)
            except Problem as refused:
                return int(refused.headers["retry-after-ms"]) / 1000
            return None

        await look(0.0, 0)
        for _ in range(100):
            assert await look(1.0, 2)
        assert await look(0.5, 1, waiting=0) is None
        clock.now += 3600
        assert await look(1.0, 0, waiting=0) is None
        first = await look(3600.0, 0, waiting=4)
        assert first
        assert 2.0 <= first <= 2.0 * 1.25 * 1.05, "4 before it, 2 a second"
        for _ in range(100):
            slow = await look(4.0, 1)
        assert slow
        assert 4.0 * 0.95 <= slow <= 8.0 * 1.25
