"""Connections to the store and the broker, by URL.

redis-py's own retries are off: they would hide lost replies from `producers.steps`, where a submit must know of them.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

SCHEMES: Final = ("redis", "rediss", "unix")
#: A server that says nothing for this long (s) is taken for lost.
SILENT_S: Final = 5.0
#: Connections of one client for commands; readers share one more, whatever their number.
POOL: Final = 16


class _Says:
    """A connection that ended while nobody looked says so as any other failure of one: uvloop has a RuntimeError for
    it, which would be taken for a fault of ours. Nothing of the command was sent."""

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        try:
            await super().send_packed_command(command, check_health=check_health)  # type: ignore[misc] # a mixin
        except RuntimeError as error:
            raise redis.ConnectionError(f"the connection is closed: {error}") from error


class _Tcp(_Says, redis.asyncio.Connection):
    pass


class _Tls(_Says, redis.asyncio.SSLConnection):
    pass


class _Unix(_Says, redis.asyncio.UnixDomainSocketConnection):
    pass


_CONNECTIONS: Final = {"redis": _Tcp, "rediss": _Tls, "unix": _Unix}


def is_redis(url: str) -> bool:
    """Whether the URL names a Redis or Valkey server, so that tasks can be put on its lists directly."""
    return urlsplit(url).scheme in SCHEMES


def connect(url: str) -> redis.Redis:
    """A client with a bounded pool. Raises ValueError for a URL of another kind."""
    pool = redis.BlockingConnectionPool.from_url(
        _checked(url),
        max_connections=POOL,
        timeout=SILENT_S,
        socket_timeout=SILENT_S,
        retry=Retry(NoBackoff(), 0),
        **_options(url),
    )
    return redis.Redis.from_pool(pool)


def connect_async(url: str) -> redis.asyncio.Redis:
    """`connect` for asyncio, where the caller sets the time limits.

    With a socket timeout, redis-py sends through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation
    that comes when the sending is done: `asyncio.timeout` around a command, say, would then have no effect.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        _checked(url),
        max_connections=POOL,
        timeout=SILENT_S,
        socket_timeout=None,
        retry=AsyncRetry(NoBackoff(), 0),
        **_options(url),
    )
    pool.connection_class = _CONNECTIONS[urlsplit(url).scheme]
    return redis.asyncio.Redis.from_pool(pool)


def kombu_url(url: str) -> str:
    """The same broker as kombu names it, which differs for Unix sockets and for TLS."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        db = parse_qs(parts.query).get("db", ["0"])[0]
        return f"redis+socket://{parts.netloc}{parts.path}?virtual_host={db}"
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in parts.query:
        return f"{url}{'&' if parts.query else '?'}ssl_cert_reqs=required"
    return url


def _checked(url: str) -> str:
    if not is_redis(url):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"a server of kind {urlsplit(url).scheme or url!r}:// is not spoken to here; use {kinds}")
    return url


def _options(url: str) -> dict[str, Any]:
    options: dict[str, Any] = {"protocol": 2}
    if urlsplit(url).scheme != "unix":
        options |= {"socket_connect_timeout": SILENT_S, "socket_keepalive": True}
    return options
