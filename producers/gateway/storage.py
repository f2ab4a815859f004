"""Reads how full the store and the broker are, for `/readyz` and `/metrics`."""

from __future__ import annotations

from producers.client.aio import AsyncClient
from producers.connection.storage import Storage, read_storage


async def read_servers(client: AsyncClient) -> dict[str, Storage]:
    """The storage of the store, and of a broker that is another server, by their names. The store is asked by
    connections that callers' requests never take. Raises redis.exceptions.RedisError or OSError."""
    found = {"store": await read_storage(client.reserved)}
    broker = None if client.one_server else await client.broker.storage()
    return found if broker is None else found | {"broker": broker}
