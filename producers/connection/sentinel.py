"""Asks Sentinels for the primary's address at each new connection.

    redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,HOST[:PORT]...]/NAME[/DB][?OPTIONS]

This is the form of other tools on redis-py. `rediss+sentinel://` uses TLS to all servers; `sentinel://` is short for
`redis+sentinel://`. User and password are the primary's; the Sentinels' own are the options `sentinel_username` and
`sentinel_password`. Other options are redis-py's. Each new connection checks that it is no replica's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode

import redis
import redis.asyncio
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError
from redis.retry import Retry

from producers.connection.script import text

SCHEMES: Final = {"sentinel": "redis", "redis+sentinel": "redis", "rediss+sentinel": "rediss"}
PORT: Final = 26379
#: Silence (s) after which a Sentinel is skipped.
PATIENCE_S: Final = 1.0
#: Interval (s) of asking again for the primary, and the pause (s) after none of them answered.
ASK_S: Final = 1.0
ASK_AGAIN_S: Final = 5.0
#: Time (s) after a failed round in which connections get the last known address without asking.
RETRY_S: Final = 1.0
#: A Sentinel's address and the error that asking it gave.
Failure = tuple[tuple[str, int], Exception]
FORM: Final = "redis+sentinel://[:PASSWORD@]HOST:PORT,HOST:PORT/NAME/DB"


@dataclass(slots=True)
class Sentinels:
    """The Sentinels that watch the primary called `name`. `addresses`: the one that answered last comes first."""

    name: str
    addresses: list[tuple[str, int]]
    tls: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Options of connections to Sentinels: `username`, `password`, `ssl_...`."""
    current: tuple[str, int] | None = None
    """The primary's address, as of the last answer."""
    _ask_at: float = 0.0
    _silent_until: float = 0.0
    _silence: Exception | None = None
    """The error of the last round without an answer; until `_silent_until` no new round is made."""

    def due(self) -> bool:
        """Whether to ask again before sending: a replaced primary may go on for seconds, and writes to it are lost.

        It answers True once per interval: one connection asks for all.
        """
        now = time.monotonic()
        if now < self._ask_at:
            return False
        self._ask_at = now + ASK_S
        return True

    def primary(self) -> tuple[str, int]:
        """The primary's host and port. Raises redis.ConnectionError if no Sentinel answers and none is known."""
        if time.monotonic() < self._silent_until:
            return self._as_before()
        failures: list[Failure] = []
        for address in list(self.addresses):
            kind = redis.SSLConnection if self.tls else redis.Connection
            connection = kind(**self._settings(address), socket_timeout=PATIENCE_S, retry=Retry(NoBackoff(), 0))
            try:
                connection.connect()
                connection.send_command(*self._question())
                return self._note_primary(address, connection.read_response())
            except (RedisError, OSError) as error:
                failures.append((address, error))
            finally:
                connection.disconnect()
        self._none_answered(failures)
        return self._as_before()

    async def aprimary(self) -> tuple[str, int]:
        """`primary` for asyncio."""
        if time.monotonic() < self._silent_until:
            return self._as_before()
        failures: list[Failure] = []
        for address in list(self.addresses):
            kind = AsyncSSLConnection if self.tls else AsyncConnection
            connection = kind(**self._settings(address), socket_timeout=None, retry=AsyncRetry(NoBackoff(), 0))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await connection.connect()
                    await connection.send_command(*self._question())
                    return self._note_primary(address, await connection.read_response())
            except (RedisError, OSError) as error:
                failures.append((address, error))
            finally:
                await connection.disconnect(nowait=True)
        self._none_answered(failures)
        return self._as_before()

    def _settings(self, address: tuple[str, int]) -> dict[str, Any]:
        host, port = address
        return {"host": host, "port": port, "socket_connect_timeout": PATIENCE_S, "protocol": 2, **self.options}

    def _question(self) -> tuple[str, str, str]:
        return ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)

    def _note_primary(self, address: tuple[str, int], answer: Any) -> tuple[str, int]:
        if not answer:
            raise ResponseError(f"it watches no primary called {self.name!r}")
        self.addresses.sort(key=lambda other: other != address)
        self.current = text(answer[0]), int(answer[1])
        self._ask_at = time.monotonic() + ASK_S
        self._silent_until = 0.0
        return self.current

    def _none_answered(self, failures: list[Failure]) -> None:
        now = time.monotonic()
        self._ask_at, self._silent_until = now + ASK_AGAIN_S, now + RETRY_S
        errors = "; ".join(f"{host}:{port}: {str(error) or type(error).__name__}" for (host, port), error in failures)
        kind = AuthenticationError if all(isinstance(e, AuthenticationError) for _, e in failures) else ConnectionError
        self._silence = kind(f"no Sentinel says where the primary {self.name!r} is ({errors})")

    def _as_before(self) -> tuple[str, int]:
        """The last known primary while no Sentinel answers: it may still serve, and HELLO checks it. Else raises."""
        if self.current is not None:
            return self.current
        assert self._silence is not None
        raise type(self._silence)(*self._silence.args)


def is_sentinel(url: str) -> bool:
    """Whether the URL names Sentinels."""
    return url.partition("://")[0] in SCHEMES


def split(url: str) -> tuple[str, Sentinels]:
    """Split a URL of Sentinels into redis-py's URL for the primary and its Sentinels. Raises ValueError."""
    scheme, _, remainder = url.partition("://")
    location, _, query = remainder.partition("?")
    authority, _, path = location.partition("/")
    user, at, hosts = authority.rpartition("@")
    name, _, db = path.partition("/")
    if not name or not hosts or ";" in url or (db and not db.isdigit()):
        raise ValueError(f"a URL of Sentinels must be {FORM}")
    options = dict(parse_qsl(query))
    theirs = {key: options.pop(f"sentinel_{key}") for key in ("username", "password") if f"sentinel_{key}" in options}
    sentinels = Sentinels(unquote(name), [_address(host) for host in hosts.split(",")], SCHEMES[scheme] == "rediss")
    plain = f"{SCHEMES[scheme]}://{user}{at}sentinel/{db or 0}" + (f"?{urlencode(options)}" if options else "")
    parsed = redis.connection.parse_url(plain)
    sentinels.options = {**{key: value for key, value in parsed.items() if key.startswith("ssl_")}, **theirs}
    return plain, sentinels


def _address(location: str) -> tuple[str, int]:
    host, colon, port = location.rpartition(":")
    if not colon or location.endswith("]"):
        host, port = location, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{location!r} is not a Sentinel's HOST:PORT; a URL of Sentinels must be {FORM}")
    return host, int(port)
