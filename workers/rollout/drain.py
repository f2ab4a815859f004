"""Tells idle workers of an old version to drain."""

from __future__ import annotations

from producers.client.aio import AsyncClient
from producers.connection.script import parsed
from producers.contract import keys


async def drain_idle(client: AsyncClient, model: str, version: str) -> int:
    """Tell each live worker of the version that holds no task to drain. Returns their number; raises redis errors."""
    listed = [one.incarnation for one in await client.broker.workers() if one.left is not None]
    told = 0
    for incarnation in listed:
        about = parsed(await client.store.get(keys.lease(incarnation)) or "{}")
        mine = (about.get("model"), about.get("version")) == (model, version)
        if mine and about.get("tasks") == 0 and not about.get("draining"):
            told += await client.store.publish(keys.control(incarnation), "drain")
    return told
