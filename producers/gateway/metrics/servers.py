"""Figures of the servers: how full their memory is, and whether they can write their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from producers.connection.storage import Storage
from producers.gateway.metrics.family import family


def described(servers: Mapping[str, Storage]) -> Iterator[Metric]:
    """Families of the servers' storage. `servers`: `store` and, where it is another server, `broker`."""
    labels = ("server",)
    text = "Memory that counts against the server's `maxmemory`."
    yield family("storage_used_bytes", text, labels, (((name,), one.used) for name, one in servers.items()))
    text = "The server's `maxmemory`; 0: no bound."
    yield family("storage_limit_bytes", text, labels, (((name,), one.limit) for name, one in servers.items()))
    text = "The used share of `maxmemory`; 0 without a bound. From 0.99 on the server is full."
    yield family("storage_used_ratio", text, labels, (((name,), one.ratio) for name, one in servers.items()))
    text = "Whether the server can write its files; if not, it refuses every write."
    yield family("storage_writable", text, labels, (((name,), not one.fault) for name, one in servers.items()))
