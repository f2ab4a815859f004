"""How much may wait, by the store's counts: what is refused, in which order of tiers, and what the caller is told."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.gateway.admission.limits import LONGEST_S, SHORTEST_S
from producers.store import protocol
from tests.producers.gateway.conftest import POOL, QUEUE, Ask, Door, Make, Open, until
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.waiting import PATIENCE_S


@pytest.fixture
def post(open_door: Open, model: str) -> Ask:
    doors: dict[Any, Door] = {}

    def send(bounds: dict[str, int], **fields: Any) -> httpx.Response:
        key = tuple(bounds.items())
        door = doors.get(key) or doors.setdefault(key, open_door(**bounds))
        return httpx.post(f"{door.url}/v1/tasks", json={"model": model, "prompt": [1], **fields}, timeout=PATIENCE_S)

    return send


def test_lower_tiers_are_refused_first_and_nothing_of_them_is_written(post: Ask, valkey: Redis) -> None:
    bound = {"max_queued": 20}
    taken = {}
    for tier in ("batch", "flex", "default", "priority"):
        answers = [post(bound, tier=tier).status_code for _ in range(22)]
        taken[tier] = answers.index(429)
        assert set(answers[taken[tier] :]) == {429}
    assert taken == {"batch": 12, "flex": 4, "default": 3, "priority": 20}
    assert len(valkey.keys(keys.task("*"))) == 19 + 20


@pytest.mark.parametrize("tier", keys.TIERS)
def test_however_small_the_bound_one_may_wait_where_nothing_does(post: Ask, tier: str) -> None:
    assert [post({"max_queued": 1}, tier=tier).status_code for _ in range(2)] == [202, 429]


def be_served(valkey: Redis, rate: float = 2_500.0) -> None:
    """A live worker serves the pool, and has started so many KV tokens a second for long."""
    valkey.sadd(keys.workers(POOL.queue), "w.1")
    valkey.set(keys.lease("w.1"), "{}")
    valkey.hset(keys.drain(QUEUE), mapping={"taken": 1000 * rate, "took": 1000})


def test_who_is_refused_is_told_when_to_come_again(post: Ask, valkey: Redis) -> None:
    bound = {"max_queued": 1}
    first = post(bound, tier="priority").json()["id"]
    refused = post(bound, tier="priority")
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["x-should-retry"] == "true"
    longest = 1000 * LONGEST_S
    assert longest <= int(refused.headers["retry-after-ms"]) <= 1.25 * longest, "nobody takes anything"
    assert int(refused.headers["retry-after"]) * 1000 >= int(refused.headers["retry-after-ms"])
    run(valkey, protocol.cancel(first))
    assert post(bound, tier="priority").status_code == 202


def test_who_has_reached_a_bound_of_its_own_waits_in_no_line(post: Ask, valkey: Redis) -> None:
    """Also where a gateway has no other bound."""
    be_served(valkey)
    bound = {"max_queued": 0, "max_queued_in_all": 0, "max_queued_per_tenant": 1}
    post(bound, tenant="greedy")
    told = [int(post(bound, tenant="greedy").headers["retry-after-ms"]) for _ in range(10)]
    assert max(told) <= 1250 * SHORTEST_S


def test_a_tenant_has_a_bound_of_its_own(post: Ask, valkey: Redis) -> None:
    bound = {"max_queued_per_tenant": 3}
    made = [post(bound, tenant="greedy").json()["id"] for _ in range(3)]
    refused = post(bound, tenant="greedy")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tenant_queue_full"
    assert "of this tenant, 3 may wait" in refused.json()["error"]["message"]
    assert post(bound, tenant="other").status_code == 202
    assert post(bound).status_code == 202
    run(valkey, protocol.cancel(made[0]))
    assert post(bound, tenant="greedy").status_code == 202


def test_all_models_together_have_a_bound(post: Ask, valkey: Redis) -> None:
    valkey.hset(keys.WAITING, mapping={"default": 18, "default penstock:queue:other@1": 18, "line": 1_000})
    bound = {"max_queued_in_all": 20}
    assert [post(bound).status_code for _ in range(2)] == [202, 429]
    said = post(bound).json()["error"]["message"]
    assert "of all models, 19 may wait" in said or "(stage priority)" in said, "the next look has come before"
    assert post(bound, tier="priority").status_code == 202, "it waits for no other tier"


def test_two_gateways_together_let_in_what_one_may(open_door: Open, model: str, valkey: Redis) -> None:
    doors = [open_door(max_queued=20, max_queued_per_tenant=15) for _ in range(2)]

    def send(number: int) -> int:
        body = {"model": model, "prompt": [1], "tier": "priority", "tenant": "ab"[number % 3 == 0]}
        return httpx.post(f"{doors[number % 2].url}/v1/tasks", json=body, timeout=PATIENCE_S).status_code

    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(send, range(80)))
    assert (answers.count(202), answers.count(429)) == (20, 60)
    assert int(valkey.hget(keys.WAITING, "priority") or 0) == len(valkey.keys(keys.task("*"))) == 20
    assert max(map(int, valkey.hvals(keys.WAITING_TENANTS))) <= 15


def test_openai_endpoints_are_bounded_too(open_door: Open, model: str, valkey: Redis) -> None:
    door = open_door(max_queued=1)
    valkey.hset(keys.WAITING, f"default {QUEUE}", 1)
    answer = httpx.post(f"{door.url}/v1/completions", json={"model": model, "prompt": "x"}, timeout=PATIENCE_S)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "queue_full"
    assert not valkey.exists(keys.READERS)


@pytest.mark.parametrize("bound", [{"max_queued": 2}, {"max_queued_per_tenant": 2}])
def test_more_prompts_than_may_ever_wait_are_the_callers_fault(
    open_door: Open, model: str, valkey: Redis, bound: dict[str, int]
) -> None:
    body = {"model": model, "prompt": ["x", "y", "z"], "service_tier": "priority"}
    answer = httpx.post(f"{open_door(**bound).url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "array_above_max_length"
    assert "send 2 at a time" in answer.json()["error"]["message"]
    assert "x-should-retry" not in answer.headers
    assert not valkey.keys(keys.task("*"))


def test_of_prompts_that_fit_in_part_none_stays(open_door: Open, model: str, valkey: Redis) -> None:
    valkey.hset(keys.WAITING, f"priority {QUEUE}", 3)
    body = {"model": model, "prompt": ["x", "y"], "service_tier": "priority"}
    answer = httpx.post(f"{open_door(max_queued=4).url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 429
    until(lambda: int(valkey.hget(keys.WAITING, f"priority {QUEUE}") or 0) == 3)


def test_a_burst_on_an_idle_system_is_told_of_seconds_and_not_of_half_a_minute(post: Ask, valkey: Redis) -> None:
    """Nothing was seen of its workers yet; each who is refused is told of the places of those before, too."""
    be_served(valkey)
    bound = {"max_queued": 20}
    refused = [one for one in [post(bound, tier="priority") for _ in range(40)] if one.status_code == 429]
    assert len(refused) == 40 - 20
    waits = [int(one.headers["retry-after-ms"]) for one in refused]
    assert waits[0] < 1_000
    assert max(waits) < 10_000


@pytest.mark.parametrize("rate", [50.0, 200.0])
def test_the_wait_is_that_of_the_queued_tokens(post: Ask, valkey: Redis, rate: float) -> None:
    """By the size of what waits, not of what is refused; at the speed at which workers started it."""
    bound = {"max_queued": 1}
    be_served(valkey, rate)
    valkey.hset(keys.WAITING, f"priority {QUEUE}", 1)
    valkey.hset(keys.WAITING_TOKENS, f"priority {QUEUE}", 1000)
    refused = post(bound, tier="priority", max_tokens=1)
    assert 1000 / rate * 0.99 <= int(refused.headers["retry-after-ms"]) / 1000 <= 1.25 * 1000 / rate * 1.01


def test_a_key_has_a_bound_of_its_own(open_door: Open, make: Make, model: str, valkey: Redis) -> None:
    url, key = open_door(auth="keys").url, make("acme", max_waiting=2)

    def send(token: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.post(f"{url}/v1/tasks", json={"model": model, "prompt": [1]}, headers=headers, timeout=PATIENCE_S)

    assert [send(key).status_code for _ in range(3)] == [202, 202, 429]
    assert send(key).json()["error"]["code"] == "key_queue_full"
    assert send(make("acme")).status_code == 202


def test_a_tenants_own_bound_goes_before_that_of_all_tenants(post: Ask, valkey: Redis) -> None:
    bound = {"max_queued_per_tenant": 1}
    valkey.hset(keys.TENANT_LIMITS, "large", json.dumps({"max_waiting": 2}))
    assert [post(bound, tenant="large").status_code for _ in range(3)] == [202, 202, 429]
    assert [post(bound, tenant="other").status_code for _ in range(2)] == [202, 429]
