"""Lists tenants with their waiting tasks and their weights, by which they share a tier; sets their limits.

Tenants need no registration: a tenant is a name in a task, and its weight is 1 unless it is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from producers.admin.keys import FIELDS, LIMITS, limited, read
from producers.client.aio import AsyncClient
from producers.connection.script import text
from producers.contract import keys
from producers.contract.keys import takers_of
from producers.store.access.api_keys import KEPT, Limits
from producers.store.access.audit import Actor
from producers.store.access.tenants import change

#: Limits that a tenant may have: all of a key but what a key's holder agrees to, and those of what is kept.
LIMITED: Final = (*(name for name in LIMITS if name != "shorten_to"), *KEPT)


@dataclass(slots=True)
class Tenant:
    """A tenant. `name`: empty for tasks without one. `waiting`: tier -> tasks, as far as workers have sorted them."""

    name: str
    weight: float = 1.0
    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, 0))


async def tenants(client: AsyncClient) -> tuple[list[Tenant], int]:
    """Tenants with waiting tasks or a weight, by name, and the number of messages not sorted by tenant yet.

    Its time grows with their number. Raises redis.exceptions.RedisError or OSError.
    """
    cards, pools = await client.store.hgetall(keys.MODELS), await client.store.hgetall(keys.POOLS)
    waiting, unsorted = await client.broker.tenants(sorted(takers_of(_texts(pools), _texts(cards))))
    weights = await client.broker.weights()
    rows = [Tenant(name, weights.get(name, 1.0)) for name in sorted(weights.keys() | waiting.keys())]
    for tenant in rows:
        tenant.waiting |= waiting.get(tenant.name, {})
    return rows, unsorted


async def limit(store: Redis, tenant: str, requested: Mapping[str, Any], actor: Actor) -> Limits:
    """Change a tenant's limits (LIMITED); None unsets one. What was counted stays counted.

    Raises InvalidTask, TooManyTenants, redis.exceptions.RedisError or OSError.
    """
    tenant = FIELDS["tenant"]("tenant", tenant)
    values = read(requested, LIMITED)
    return await change(store, tenant, lambda old: limited(old, values), actor.did("tenant.limit", tenant, tenant))


def _texts(raw: Mapping[Any, Any]) -> dict[str, str]:
    return {text(name): text(value) for name, value in raw.items()}
