"""Connections to the store and the broker, by URL: for every process, blocking or asyncio, pooled or single.

    redis:// rediss:// unix://                          the server itself
    sentinel:// redis+sentinel:// rediss+sentinel://    whom to ask where the primary is (sentinel.py)

Each new connection finds the primary, and looks what it is (`producers.connection.hello`). One whose server was demoted
is closed, so that the next finds the new one. redis-py's own retries are off: they would hide lost replies from
`producers.client.steps`, where a submit must know of them.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection as AsyncAbstractConnection
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import parse_url as parse_url_async
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, parse_url
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.retry import Retry

from producers.connection import sentinel
from producers.connection.hello import check_hello, not_hello
from producers.connection.trouble import NotPrimary

SCHEMES: Final = ("redis", "rediss", "unix", *sentinel.SCHEMES)
#: A server that says nothing for this long (s) is taken for lost.
SILENT_S: Final = 5.0
#: Connections of one client for commands; readers share one more, whatever their number.
POOL: Final = 16
#: What the kernel does about a peer that vanished without a word: it asks after 5 s of silence, three times, 2 s apart,
#: and waits no longer than 10 s for what was sent to be taken. Names that a system lacks are left out.
TCP: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
MOVED: Final = "the Sentinels name another primary, connecting to that"
DEMOTED: Final = "the server was demoted to a replica, connecting to its primary"


def is_redis(url: str) -> bool:
    """Whether the URL names a Redis or Valkey server, so that tasks can be put on its lists directly."""
    return url.partition("://")[0] in SCHEMES


def connect(url: str, *, timeout: float | None = SILENT_S, protocol: int = 2, decode: bool = False) -> redis.Redis:
    """A client with a bounded pool; `timeout`: of each answer (s). `decode`: answers are text, in which what is no
    UTF-8 is replaced. Raises ValueError for a URL of another kind."""
    return redis.Redis.from_pool(connection_pool(url, timeout=timeout, protocol=protocol, decode=decode))


def connection_pool(
    url: str,
    mixin: type | None = None,
    *,
    timeout: float | None = SILENT_S,
    protocol: int = 2,
    decode: bool = False,
) -> redis.BlockingConnectionPool:
    """`connect`'s pool. `mixin`: goes before its connections' class. Raises ValueError for a URL of another kind."""
    plain, sentinels = _read(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout,
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": _look,
        "decode_responses": decode,
        "encoding_errors": "replace" if decode else "strict",
        **_options(plain, protocol),
    }
    options |= parse_url(plain)
    base = options.pop("connection_class", redis.Connection)
    if sentinels is not None:
        options["sentinels"] = sentinels
    kind = _class(mixin, _Found if sentinels is not None else None, _Checked, base)
    return redis.BlockingConnectionPool(max_connections=POOL, timeout=SILENT_S, connection_class=kind, **options)


def connect_async(url: str) -> redis.asyncio.Redis:
    """`connect` for asyncio, where the caller sets the time limits.

    With a socket timeout, redis-py sends through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation
    that comes when the sending is done: `asyncio.timeout` around a command, say, would then have no effect.
    """
    plain, sentinels = _read(url)
    options: dict[str, Any] = {
        "socket_timeout": None,
        "retry": AsyncRetry(NoBackoff(), 0),
        "redis_connect_func": _look_async,
        **_options(plain, 2),
    }
    options |= parse_url_async(plain)
    base = options.pop("connection_class", AsyncConnection)
    if sentinels is not None:
        options["sentinels"] = sentinels
    kind = _class(_AsyncFound if sentinels is not None else None, _AsyncChecked, base)
    pool = redis.asyncio.BlockingConnectionPool(
        max_connections=POOL, timeout=SILENT_S, connection_class=kind, **options
    )
    return redis.asyncio.Redis.from_pool(pool)


def kombu_url(url: str) -> str:
    """The same broker as kombu names it, which differs for Unix sockets, for TLS and for Sentinels, and knows no
    options but those of TLS."""
    if sentinel.is_sentinel(url):
        plain, sentinels = sentinel.split(url)
        host, port = sentinels.addresses[0]
        url = plain.replace("@sentinel/", f"@{host}:{port}/").replace("//sentinel/", f"//{host}:{port}/")
    parts = urlsplit(url)
    if parts.scheme == "unix":
        db = parse_qs(parts.query).get("db", ["0"])[0]
        return f"redis+socket://{parts.netloc}{parts.path}?virtual_host={db}"
    options = [option for option in parts.query.split("&") if option.startswith("ssl_")]
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in parts.query:
        options.append("ssl_cert_reqs=required")
    return url.partition("?")[0] + (f"?{'&'.join(options)}" if options else "")


def shown(url: str) -> str:
    """The URL as it may be shown: neither user nor password, nor what follows the path (it may name them, too)."""
    scheme, mark, rest = url.partition("://")
    place = (rest if mark else url).rpartition("@")[2].partition("?")[0]
    return f"{scheme}{mark}{place}" if mark else place


class _Checked(AbstractConnection):
    """Looks at the server before it is used, and closes when that becomes a replica."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        tcp: Any = super()
        try:
            return tcp.read_response(*args, **options)
        except ReadOnlyError as error:
            tcp.disconnect()
            raise NotPrimary(DEMOTED) from error


class _Found(AbstractConnection):
    """Asks Sentinels where to connect to."""

    def __init__(self, *, sentinels: sentinel.Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**options)

    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.primary()
        tcp: Any = super()
        return tcp._connect()

    def send_packed_command(self, *args: Any, **options: Any) -> Any:
        tcp: Any = super()
        sentinels = self._sentinels
        if sentinels.due():
            with suppress(RedisError):
                sentinels.primary()
        if vars(self)["_sock"] is not None and (self.host, self.port) != sentinels.current:
            tcp.disconnect()
            raise NotPrimary(MOVED)
        return tcp.send_packed_command(*args, **options)


class _AsyncChecked(AsyncAbstractConnection):
    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)
        except RuntimeError as error:
            # It ended while nobody looked, for which uvloop has an error of its own, which would be taken for a fault
            # of ours. Nothing of the command was sent.
            raise redis.ConnectionError(f"the connection is closed: {error}") from error

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ReadOnlyError as error:
            await self.disconnect(nowait=True)
            raise NotPrimary(DEMOTED) from error


class _AsyncFound(AsyncAbstractConnection):
    def __init__(self, *, sentinels: sentinel.Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await self._sentinels.aprimary()
        tcp: Any = super()
        await tcp._connect()

    async def send_packed_command(self, *args: Any, **options: Any) -> Any:
        tcp: Any = super()
        sentinels = self._sentinels
        if sentinels.due():
            with suppress(RedisError):
                await sentinels.aprimary()
        if tcp.is_connected and (self.host, self.port) != sentinels.current:
            await tcp.disconnect(nowait=True)
            raise NotPrimary(MOVED)
        return await tcp.send_packed_command(*args, **options)


def _look(connection: Any) -> None:
    connection.on_connect()
    connection.send_command("HELLO")
    where = connection._host_error()
    try:
        answer = connection.read_response()
    except ResponseError as error:
        raise not_hello(error, where) from error
    check_hello(answer, where)


async def _look_async(connection: Any) -> None:
    await connection.on_connect()
    await connection.send_command("HELLO")
    where = connection._host_error()
    try:
        answer = await connection.read_response()
    except ResponseError as error:
        raise not_hello(error, where) from error
    check_hello(answer, where)


@cache
def _class(*parts: type | None) -> type:
    return type("PenstockConnection", tuple(part for part in parts if part is not None), {})


def _read(url: str) -> tuple[str, sentinel.Sentinels | None]:
    """The URL as redis-py reads it, and whom to ask for the primary."""
    if not is_redis(url):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{shown(url)!r} is not spoken to here: a server's URL begins with {kinds}")
    return _split(url) if sentinel.is_sentinel(url) else (url, None)


#: All connections of a process see one primary: where one has moved to, the others follow before they send anything.
_split = cache(sentinel.split)


def _options(url: str, protocol: int) -> dict[str, Any]:
    options: dict[str, Any] = {"protocol": protocol}
    if not url.startswith("unix:"):  # whose connections know none of these
        named = {getattr(socket, name): value for name, value in TCP.items() if hasattr(socket, name)}
        options |= {"socket_connect_timeout": SILENT_S, "socket_keepalive": True, "socket_keepalive_options": named}
    return options
