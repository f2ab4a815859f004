"""Tenants, as the broker knows them: what waits of each, and the weights by which they share a tier.

Nobody has to be entered anywhere: a tenant is a name that a task gives, and its weight is 1 until it is said otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.connection.script import text
from producers.contract import keys

#: FETCH and the engine have these bounds, too. What lies outside counts as 1.
MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0


@dataclass(slots=True)
class Tenant:
    """`name` is empty for all who give none. `waiting`: tasks by tier, as far as workers have sorted them."""

    name: str
    weight: float = 1.0
    waiting: dict[str, int] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, 0))


def read_weights(raw: Mapping[Any, Any]) -> dict[str, float]:
    """The hash of weights, without those that are none."""
    found = {}
    for name, said in raw.items():
        with suppress(ValueError):
            weight = float(text(said))
            if MIN_WEIGHT <= weight <= MAX_WEIGHT:
                found[text(name)] = weight
    return found


async def tenants(client: AsyncClient) -> tuple[list[Tenant], int]:
    """Those of whom something waits or who have a weight of their own, by name; and how many messages have not been
    sorted by tenant yet. Takes time with their number. Raises redis.exceptions.RedisError or OSError."""
    models, pools = await client.store.hkeys(keys.MODELS), await client.store.hgetall(keys.POOLS)
    queues = {keys.model_queue(text(model)) for model in models} | set(map(text, pools))
    queues |= {keys.model_queue(json.loads(about)["model"]) for about in pools.values()}
    found = {name: Tenant(name, weight) for name, weight in read_weights(await _weights(client)).items()}
    unsorted = 0
    for name, tier in [(n, t) for q in sorted(queues) for t in keys.TIERS for n in keys.tier_lists(q, t)]:
        unsorted += await client.broker.llen(name)
        for raw in await client.broker.zrange(keys.turns(name), 0, -1):
            tenant = text(raw)
            one = found.setdefault(tenant, Tenant(tenant))
            one.waiting[tier] += await client.broker.zcard(keys.turn(name, tenant))
    return [found[name] for name in sorted(found)], unsorted


async def weigh(client: AsyncClient, tenant: str, weight: float) -> None:
    """From the next fetch on. Raises ValueError for a weight out of bounds."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight is {weight:g}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    if weight == 1:
        await client.broker.execute_command("HDEL", keys.WEIGHTS, tenant)
    else:
        await client.broker.execute_command("HSET", keys.WEIGHTS, tenant, repr(weight))


async def _weights(client: AsyncClient) -> Mapping[Any, Any]:
    weights: Mapping[Any, Any] = await client.broker.execute_command("HGETALL", keys.WEIGHTS)
    return weights
