"""Records tell which tasks of a tenant came before another one."""

from __future__ import annotations

import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin.observation import count_tenants
from producers.broker.values import NO_COUNTS, TenantCounts
from producers.contract import keys
from producers.contract.message import Message


async def test_records_tell_how_many_came_before_and_how_large_they_are(valkey: Redis, valkey_url: str) -> None:
    """A sample of many comes from all over their order; a record that is gone counts as nothing."""
    valkey.hset(keys.WAITING_TENANTS, mapping={"a": 750, "b": 5})
    valkey.zadd(keys.tasks("a"), {f"task-{number}": number for number in range(1000)})
    for number in range(1000):
        if number % 3:
            valkey.hset(keys.task(f"task-{number}"), "tokens", 100 if number < 500 else 300)
    async with AsyncRedis.from_url(valkey_url) as store:

        async def counted(at: int, since: float) -> TenantCounts:
            return await count_tenants(store, Message("it", "q", "default", 1, 7, "a", at), since)

        tenants = {"a": 750, "b": 5}
        assert await counted(750, 0.25) == TenantCounts(tenants, 500 / 750, pytest.approx(200, rel=0.02))
        assert await counted(253, 0.25) == TenantCounts(tenants, 3 / 750, 100.0)
        assert await counted(250, 0.25) == TenantCounts(tenants, 0.0, None)
        valkey.delete(keys.WAITING_TENANTS)
        assert await counted(750, 0.25) == NO_COUNTS


async def test_a_few_listed_tasks_tell_nothing_of_those_that_no_list_shows(valkey: Redis, valkey_url: str) -> None:
    """As of a tenant whose responses wait, and one task."""
    valkey.hset(keys.WAITING_TENANTS, mapping={"a": 61, "b": 60})
    valkey.zadd(keys.tasks("a"), {"it": 1000})
    async with AsyncRedis.from_url(valkey_url) as store:
        assert (await count_tenants(store, Message("it", "q", "default", 1, 7, "a", 1000), 0.25)).before is None
