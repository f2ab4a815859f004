"""Lists tenants with their waiting tasks and their weights, by which they share a tier.

Tenants need no registration: a tenant is a name in a task, and its weight is 1 unless it is set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from producers.client.aio import AsyncClient
from producers.connection.script import text
from producers.contract import keys


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
    models, pools = await client.store.hkeys(keys.MODELS), await client.store.hgetall(keys.POOLS)
    queues = {keys.model_queue(text(model)) for model in models} | set(map(text, pools))
    queues |= {keys.model_queue(json.loads(about)["model"]) for about in pools.values()}
    waiting, unsorted = await client.broker.tenants(sorted(queues))
    weights = await client.broker.weights()
    found = [Tenant(name, weights.get(name, 1.0)) for name in sorted(weights.keys() | waiting.keys())]
    for one in found:
        one.waiting |= waiting.get(one.name, {})
    return found, unsorted
