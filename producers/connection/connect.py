"""Connections to the store and the broker, by URL: for every process, blocking or asyncio, pooled or single.

    redis:// rediss:// unix://                          the server itself
    sentinel:// redis+sentinel:// rediss+sentinel://    Sentinels that know the primary (sentinel.py)

Each new connection finds the primary and checks it by its answer to HELLO: kind, version and role. A connection to a
demoted server is closed, and the next one finds the new primary. A silent server is waited for once (`Silence`).
redis-py's own retries are off: they would hide lost replies from `producers.client.steps`, where a submit must know of
them.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import hiredis
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
from producers.connection.script import text
from producers.connection.trouble import NotPrimary, UnusableServer, trouble
from producers.connection.turns import OWNER, Turns

SCHEMES: Final = ("redis", "rediss", "unix", *sentinel.SCHEMES)
#: Oldest Redis version: scripts with flags (`#!lua flags=allow-oom`) need it. Every Valkey version is later.
OLDEST_REDIS: Final = (7, 0)
#: Silence (s) after which a server counts as lost.
SILENT_S: Final = 5.0
#: Share of SILENT_S after which a call that is given up shows a silent server: a caller's own limit of that length
#: began a moment earlier. No answer may have come for that share of its wait.
ENOUGH: Final = 0.8
#: Time (s) from an attempt without an answer to the next one.
PAUSE_S: Final = 0.2
#: Most connections of one client for commands; those of them that one owner (`producers.connection.turns`) may have at
#: once. All its readers share one more.
POOL: Final = 16
EACH: Final = 12
#: The same of a pool beside that: for bulk reads, or for work that callers must not delay.
SMALL_POOL: Final = 4
SMALL_EACH: Final = 2
#: Longest wait (s) for a connection of an asyncio client; then `turns.Busy` is raised.
WAIT_S: Final = 2.0
#: TCP options that detect a vanished peer: keepalive probes after 5 s of silence, three times, 2 s apart, and at most
#: 10 s (in ms) for an acknowledgement. Options that a system lacks are left out.
TCP: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}
#: Lateness (s) of a timer that shows that this process was stopped, as by SIGSTOP: then the server is not silent.
HELD_UP_S: Final = 0.5
#: Bytes that one read of a connection that only listens takes at most.
READ: Final = 1 << 16
MOVED: Final = "the Sentinels name another primary, connecting to that"
CLOSED: Final = "the server closed the connection"
LOST: Final = "another connection had no answer, so this one may be lost, too; connecting again"
DEMOTED: Final = "the server was demoted to a replica, connecting to its primary"


def is_redis(url: str) -> bool:
    """Whether the URL names a Redis or Valkey server, so that tasks can be put on its lists directly."""
    return url.partition("://")[0] in SCHEMES


def connect(url: str, *, timeout: float | None = SILENT_S, protocol: int = 2, decode: bool = False) -> redis.Redis:
    """A client with a bounded pool. Raises ValueError for a URL of another kind.

    `timeout`: longest wait for each answer (s). `decode`: answers are text, with bytes that are not UTF-8 replaced.
    """
    return redis.Redis.from_pool(connection_pool(url, timeout=timeout, protocol=protocol, decode=decode))


def connection_pool(
    url: str, mixin: type | None = None, *, timeout: float | None = SILENT_S, protocol: int = 2, decode: bool = False
) -> redis.BlockingConnectionPool:
    """The pool of `connect`. `mixin`: a class put before its connections' class. Raises as `connect` does."""
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
    kind = _class(mixin, _Located if sentinels is not None else None, _Checked, base)
    return redis.BlockingConnectionPool(max_connections=POOL, timeout=SILENT_S, connection_class=kind, **options)


@dataclass(frozen=True, slots=True)
class Pools:
    """Three clients of one server for asyncio, each with connections of its own, which callers get by turns.

    A silent server is waited for once, by whichever notices it first.
    """

    general: redis.asyncio.Redis
    bulk: redis.asyncio.Redis
    """For large reads: a small share, so that server and process mostly work for other calls."""
    reserved: redis.asyncio.Redis
    """For work that callers must not delay: their authentication, ended keys, readiness."""

    async def aclose(self) -> None:
        for client in (self.general, self.bulk, self.reserved):
            await client.aclose()


def connect_async(url: str) -> redis.asyncio.Redis:
    """`connect` for asyncio: an answer that takes longer than SILENT_S is a TimeoutError. The caller limits the rest.

    With a socket timeout, redis-py sends through `asyncio.wait_for`, which before Python 3.12 swallows a cancellation
    that comes as the sending ends. `asyncio.timeout` around a command would then have no effect.
    """
    return _client(Turns(POOL, EACH), *_options_async(url))


def connect_pools(url: str) -> Pools:
    """`connect_async`, with pools for several kinds of work. They connect when they are used."""
    kind, options = _options_async(url)
    sizes = (POOL, EACH), (SMALL_POOL, SMALL_EACH), (SMALL_POOL, SMALL_EACH)
    return Pools(*(_client(Turns(places, each), kind, options) for places, each in sizes))


def _options_async(url: str) -> tuple[type, dict[str, Any]]:
    """The class of a URL's connections, and its arguments."""
    plain, sentinels = _read(url)
    options: dict[str, Any] = {
        "socket_timeout": None,
        "retry": AsyncRetry(NoBackoff(), 0),
        "redis_connect_func": _look_async,
        "silence": Silence(),
        **_options(plain, 2),
    }
    options |= parse_url_async(plain)
    base = options.pop("connection_class", AsyncConnection)
    if sentinels is not None:
        options["sentinels"] = sentinels
    return _class(_AsyncLocated if sentinels is not None else None, _AsyncChecked, base), options


def _client(turns: Turns, kind: type, options: dict[str, Any]) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_pool(_TurnsPool(turns, connection_class=kind, **options))


class _TurnsPool(redis.asyncio.ConnectionPool):
    """A pool whose connections go by turns to the owners that wait for them. Raises `turns.Busy` after WAIT_S.

    redis-py's own pool serves whoever came first, however many that are of one caller. It also takes several locks and
    timers for each command; here a command that need not wait costs a few operations of dicts.
    """

    def __init__(self, turns: Turns, **options: Any) -> None:
        super().__init__(max_connections=turns.places, **options)
        self._turns = turns
        self._owners: dict[AsyncAbstractConnection, Hashable] = {}

    async def get_connection(self, *_: Any, **__: Any) -> AsyncAbstractConnection:
        owner = OWNER.get()
        if not self._turns.take(owner):
            await self._turns.wait(owner, WAIT_S)
        pool: Any = self
        connection: AsyncAbstractConnection = pool.get_available_connection()
        self._owners[connection] = owner
        try:
            await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AsyncAbstractConnection) -> None:
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)
        self._turns.give(self._owners.pop(connection))


def kombu_url(url: str) -> str:
    """The broker's URL in kombu's form, which differs for Unix sockets, TLS and Sentinels. Keeps only TLS options."""
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
    """The URL without user, password and query (which may hold passwords, too), for messages. A URL of SQS is shown
    whole: it has no password, and its query names the queues."""
    if url.startswith("sqs://") and "@" not in url:
        return url
    scheme, mark, remainder = url.partition("://")
    location = (remainder if mark else url).rpartition("@")[2].partition("?")[0]
    return f"{scheme}{mark}{location}" if mark else location


@cache
def _class(*parts: type | None) -> type:
    return type("PenstockConnection", tuple(part for part in parts if part is not None), {})


def _read(url: str) -> tuple[str, sentinel.Sentinels | None]:
    """The URL in redis-py's form, and the Sentinels to ask for the primary, or None."""
    if not is_redis(url):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{shown(url)!r} is not supported: a server's URL begins with {kinds}")
    if sentinel.is_sentinel(url):
        return _split(url)
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():  # redis-py would take database 0
        raise ValueError(f"{database!r} is not the number of a database; the URL must end in one, as in /0")
    return url, None


#: Cached, so that a process's connections share Sentinels: when one moves, the others follow before they send.
_split = cache(sentinel.split)


def _options(url: str, protocol: int) -> dict[str, Any]:
    options: dict[str, Any] = {"protocol": protocol, **_driver()}
    if not url.startswith("unix:"):  # Unix sockets have none of these options
        named = {getattr(socket, name): value for name, value in TCP.items() if hasattr(socket, name)}
        options |= {"socket_connect_timeout": SILENT_S, "socket_keepalive": True, "socket_keepalive_options": named}
    return options


@cache
def _driver() -> dict[str, Any]:
    """The option with redis-py's name and version, which a connection tells the server. Without it, each connection
    reads the version from the installed package's files, which takes 3 ms."""
    try:
        from redis.driver_info import DriverInfo
    except ImportError:  # an earlier redis-py
        return {}
    return {"driver_info": DriverInfo(lib_version=redis.__version__)}


# ---- connections ----------------------------------------------------------------------------------------------------


class Silent(TimeoutError):
    """The server is silent, and nothing was sent. `since`: when the first call without an answer began (monotonic)."""

    def __init__(self, since: float) -> None:
        super().__init__(f"no answer for {time.monotonic() - since:.0f} s")
        self.since = since


class Silence:
    """One server's silence, as the connections of one client see it.

        no answer for SILENT_S ─▶ silent ─▶ one connection tries at a time, other calls raise Silent ─▶ answer ─▶ over

    A request makes several calls: without this each of them, and each of the next request, would wait as long again.
    A server that answers other connections while a call waits is not silent: that call is slow, or its connection lost.
    """

    __slots__ = ("_answered_at", "_doubt", "_next", "_since", "_where")

    def __init__(self) -> None:
        self._where = ""
        self._since: float | None = None
        self._doubt = self._answered_at = self._next = 0.0

    def enter(self, where: str) -> float:
        """Allow a connection to this address. Returns the argument of `tried`. Raises Silent while another tries."""
        if self._since is None or where != self._where:
            return 0.0
        now = time.monotonic()
        if now < self._next:
            raise Silent(self._since)
        if now > self._next + SILENT_S:  # no try for long, so nothing is known of the server
            self._since = None
            return 0.0
        self._next = now + SILENT_S + PAUSE_S
        return self._next

    def tried(self, entered: float) -> None:
        """The connection that `enter` allowed was not made: another one may try."""
        if entered == self._next:
            self._next = time.monotonic() + PAUSE_S

    def doubts(self, answered_at: float) -> bool:
        """Whether a connection may be lost whose last answer came at this time (monotonic): another one's call, which
        began later, had no answer."""
        return answered_at < self._doubt

    def answered(self) -> float:
        """Note that an answer has come. Returns the time (monotonic)."""
        self._since = None
        self._answered_at = time.monotonic()
        return self._answered_at

    def unanswered(self, where: str, waited: float) -> None:
        """Note that a call to this address was given up after so many seconds, enough to show a silent server."""
        now = time.monotonic()
        self._doubt = max(self._doubt, now - waited)
        if self._answered_at <= now - ENOUGH * waited and (self._since is None or where != self._where):
            self._where, self._since, self._next = where, now - waited, now + PAUSE_S


class _Checked(AbstractConnection):
    """A connection that closes when its server becomes a replica."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        tcp: Any = super()
        try:
            return tcp.read_response(*args, **options)
        except ReadOnlyError as error:
            tcp.disconnect()
            raise NotPrimary(DEMOTED) from error


class _Located(AbstractConnection):
    """A connection that asks Sentinels for its address, and closes when the primary has moved."""

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
    """As `_Checked`. It also gives up a server without an answer, once for all connections of its client."""

    def __init__(self, *, silence: Silence, **options: Any) -> None:
        self._silence = silence
        self._answered_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        super().__init__(**options)

    async def connect(self) -> None:
        """Connect, unless it is connected. Called for each use of a pooled connection."""
        if self.is_connected:
            if not self._silence.doubts(self._answered_at):
                return
            await self.disconnect(nowait=True)
        tcp: Any = super()
        await tcp.connect()

    async def connect_check_health(self, *args: Any, **options: Any) -> None:
        if self.is_connected:
            return
        entered = self._silence.enter(self._host_error())
        self._answered_at = began = time.monotonic()
        try:
            await super().connect_check_health(*args, **options)
        except BaseException:
            self._given_up(time.monotonic() - began)
            self._silence.tried(entered)
            raise

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        if self.is_connected and self._silence.doubts(self._answered_at):  # it may have a WATCH or subscriptions
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(LOST)
        try:
            await super().send_packed_command(*args, **options)
        except RuntimeError as error:
            # uvloop's own error for a connection that ended unnoticed. Nothing of the command was sent.
            raise redis.ConnectionError(f"the connection is closed: {error}") from error

    async def read_response(self, *args: Any, disconnect_on_error: bool = True, **options: Any) -> Any:
        """Close a connection without an answer after SILENT_S; `asyncio.timeout` would cost each answer 7 µs."""
        # A subscription, which lives on where others are closed, may be silent.
        self._timer = timer = self._later(SILENT_S) if disconnect_on_error else None
        try:
            answer = await super().read_response(*args, disconnect_on_error=disconnect_on_error, **options)
        except ResponseError as error:
            self._answered_at = self._silence.answered()
            if not isinstance(error, ReadOnlyError):
                raise
            await self.disconnect(nowait=True)
            raise NotPrimary(DEMOTED) from error
        except BaseException as error:
            if timer is None:
                raise
            remaining = timer.when() - asyncio.get_running_loop().time()
            self._given_up(SILENT_S - remaining)
            if remaining > 0 or not isinstance(error, redis.ConnectionError):
                raise
            raise TimeoutError(f"no answer for {SILENT_S:g} s") from error
        finally:
            if self._timer is not None:
                self._timer.cancel()
        self._answered_at = self._silence.answered()
        return answer

    async def replies(self) -> AsyncGenerator[list[Any]]:
        """Yields what comes on a connection that listens, in lists of all that one read has. Nothing else may read from
        it: `read_response` would take several times as long. Raises redis.exceptions.RedisError or OSError.
        """
        stream: Any = self._reader
        parser = hiredis.Reader(protocolError=redis.InvalidResponse, replyError=ResponseError)
        while data := await stream.read(READ):
            parser.feed(data)
            replies: list[Any] = []
            while (reply := parser.gets()) is not False:
                if isinstance(reply, ResponseError):
                    raise reply
                replies.append(reply)
            self._answered_at = self._silence.answered()
            if replies:
                yield replies
        raise redis.ConnectionError(CLOSED)

    def _given_up(self, waited: float) -> None:
        if ENOUGH * SILENT_S <= waited < SILENT_S + HELD_UP_S:
            self._silence.unanswered(self._host_error(), waited)

    def _later(self, seconds: float) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_later(seconds, self._abort, loop.time() + seconds)

    def _abort(self, due: float) -> None:
        if asyncio.get_running_loop().time() > due + HELD_UP_S:
            self._timer = self._later(HELD_UP_S)  # the answer may be there, unread
        elif self._writer is not None:
            self._writer.transport.abort()


class _AsyncLocated(AsyncAbstractConnection):
    """As `_Located`."""

    def __init__(self, *, sentinels: sentinel.Sentinels, **options: Any) -> None:
        self._sentinels = sentinels
        super().__init__(**options)

    async def connect_check_health(self, *args: Any, **options: Any) -> None:
        tcp: Any = super()
        if not tcp.is_connected:
            self.host, self.port = await self._sentinels.aprimary()
        await tcp.connect_check_health(*args, **options)

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


# ---- new connections ------------------------------------------------------------------------------------------------


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


def check_hello(answer: Mapping[Any, Any] | Sequence[Any], where: str) -> None:
    """Check HELLO's answer. Raises UnusableServer or NotPrimary. `where`: the server's name for messages."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
    server = {text(name): text(value) for name, value in pairs}
    kind = f"{server['server']} {server['version']}"
    if server["mode"] == "cluster":
        raise UnusableServer(
            f"the server at {where} is a Redis Cluster, which Penstock cannot use: its scripts change several keys "
            "at once. Use a single primary, with Sentinel for failover"
        )
    if server["mode"] == "sentinel":
        raise UnusableServer(
            f"the server at {where} is a Sentinel, which holds no data; to ask it for the primary, write "
            f"redis+sentinel://{where}/NAME"
        )
    if server["server"] == "redis" and _version(server["version"]) < OLDEST_REDIS:
        oldest = ".".join(map(str, OLDEST_REDIS))
        raise UnusableServer(f"the server at {where} is {kind}; Penstock needs Redis {oldest} or later, or any Valkey")
    if server["role"] != "master":
        raise NotPrimary(
            f"the server at {where} is a replica, which takes no writes; name its primary, or Sentinels that know it"
        )


def not_hello(error: ResponseError, where: str) -> RedisError:
    """The exception to raise if HELLO is refused. Servers before Redis 6 do not know it."""
    if trouble(error) is not None:
        return error
    return UnusableServer(
        f"the server at {where} does not know HELLO ({error}): it is older than Redis 6, or a proxy. "
        f"Penstock needs Redis {'.'.join(map(str, OLDEST_REDIS))} or later, or any Valkey"
    )


def _version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
