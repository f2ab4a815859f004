"""The API keys of a run: several tenants, several keys, each limit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from producers.admin.keys import create
from producers.admin.tenants import limit
from producers.connection.connect import connect_async
from producers.store.access.audit import Actor
from workers.trials.chaos.checker.case import Journal
from workers.trials.chaos.senders import Holder

#: (tenant, limits), where limits of tokens are in longest outputs. The last key is for the run in quiet.
HOLDERS: Final[tuple[tuple[str, Mapping[str, int]], ...]] = (
    ("acme", {"max_in_flight": 3}),
    ("acme", {"tpm": 15, "max_in_flight": 8}),
    ("globex", {"budget_tokens": 20}),
    ("globex", {"rpm": 40, "budget_tokens": 500}),
    ("initech", {}),
    ("quiet", {}),
)
#: Limits of tenants, which all of a tenant's keys share.
TENANTS: Final[Mapping[str, Mapping[str, int]]] = {"acme": {"max_in_flight": 7}, "initech": {"budget_tokens": 1000}}
TOKENS: Final = ("tpm", "budget_tokens")


def make_holders(store: str, journal: Journal, longest: int) -> tuple[Holder, ...]:
    """Make the keys, and journal them. `store`: its URL. `longest`: longest output in tokens."""
    return asyncio.run(_made(store, journal, longest))


async def _made(store: str, journal: Journal, longest: int) -> tuple[Holder, ...]:
    found = []
    async with connect_async(store) as server:
        for tenant, limits in TENANTS.items():
            most = _most(limits, longest)
            await limit(server, tenant, most, Actor("chaos"))
            journal.write("key", id=f"tenant:{tenant}", tenant=tenant, limits=most)
        for tenant, limits in HOLDERS:
            most = _most(limits, longest)
            key, token = await create(server, {"tenant": tenant, **most}, Actor("chaos"))
            journal.write("key", id=key.id, tenant=tenant, limits=most)
            found.append(Holder(tenant, token))
    return tuple(found)


def _most(limits: Mapping[str, int], longest: int) -> dict[str, int]:
    return {name: value * longest if name in TOKENS else value for name, value in limits.items()}
