"""Connections to the broker and the store: `producers.connection.connect`, and what a worker makes of their errors."""

from __future__ import annotations

from redis.exceptions import RedisError

from producers.connection.connect import connect
from producers.store import servers
from workers.errors import Refused

__all__ = ["LOST", "check_server", "connect"]

#: Exceptions of a lost or refused connection.
LOST = (RedisError, OSError)


def check_server(url: str, role: str) -> None:
    """Raises Refused where the server cannot be used or reached, and says why."""
    try:
        servers.check_server(url, role)
    except servers.ServerRefused as refused:
        raise Refused(str(refused)) from refused
