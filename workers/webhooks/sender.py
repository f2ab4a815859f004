"""One try of a delivery: resolve, check the addresses, connect to one of them, POST, read the answer's beginning.

Whatever a receiver does, a try ends in time, holds a few KB, follows no redirect, and connects to no address that was
not checked. `next_delay` is the time until a failed delivery is tried again (the schedule of standardwebhooks.com).
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NoReturn

import aiohttp
from aiohttp.abc import AbstractResolver
from standardwebhooks import Webhook
from yarl import URL

from producers.connection.addresses import Address, Network, Resolver, Unresolved, refusal
from producers.contract.webhook import Destination
from producers.release import release
from producers.store.outbox import Attempt, Row

#: Bytes of an answer that are kept, and that are read ahead.
KEPT, READ_AHEAD = 1024, 4096
#: Time (s) for the answer's body, once its status is known.
BODY_S: Final = 2.0
#: Time (s) for a connection to one address; the first addresses of a host are tried in turn.
CONNECT_S, ADDRESSES = 5.0, 3
#: Time (s) for which an idle connection is kept, less than receivers keep it.
IDLE_S: Final = 2.0
#: Statuses of receivers who cannot keep up.
OVERLOADED: Final = frozenset({408, 429, 502, 503, 504})
#: This machine's own trouble: no file descriptors, memory or ports left.
OURS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
USER_AGENT: Final = f"Penstock/{release()}"
#: Longest wait (s) that a receiver's Retry-After is granted.
MAX_RETRY_AFTER_S: Final = 24 * 3600.0
#: A wait is up to this much longer than the schedule says, so that retries do not come all at once.
JITTER: Final = 0.2


class OwnTrouble(Exception):
    """This process lacks what a connection needs; the receiver had no part in it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a try. `retry_after_s`: the receiver's Retry-After."""

    attempt: Attempt
    retry_after_s: float | None = None

    @property
    def delivered(self) -> bool:
        return self.attempt.status is not None and 200 <= self.attempt.status < 300

    @property
    def well(self) -> bool | None:
        """Whether the receiver keeps up; None for an answer that does not show it."""
        if self.attempt.status is None or self.attempt.status in OVERLOADED:
            return False
        return True if self.delivered else None

    @property
    def gone(self) -> bool:
        """The receiver wants no more events."""
        return self.attempt.status == 410


class _Refused(Exception):
    """The URL must not be called."""


class _ResolvesNothing(AbstractResolver):
    """Only checked addresses are connected to, never names."""

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> NoReturn:
        raise OSError(f"{host} is not an address")

    async def close(self) -> None:
        """Nothing is open."""


def body_of(row: Row) -> str:
    """The event as JSON, the same at each try."""
    event = {
        "id": row.webhook_id,
        "object": "event",
        "created_at": row.at,
        "type": row.type,
        "data": {"id": row.object},
    }
    return json.dumps(event, separators=(",", ":"))


def headers_of(row: Row, body: str, secrets: Sequence[str], now: datetime | None = None) -> dict[str, str]:
    """The headers of a try at `now` (UTC): one signature for each secret, as standardwebhooks.com says."""
    # standardwebhooks takes any time's wall clock for UTC, so it gets UTC alone.
    at = (now or datetime.now(UTC)).astimezone(UTC)
    restored = {"penstock-restored": "1"} if row.restored else {}
    return {
        **restored,
        "content-type": "application/json",
        "user-agent": USER_AGENT,
        "accept-encoding": "identity",
        "webhook-id": row.webhook_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(Webhook(secret).sign(row.webhook_id, at, body) for secret in secrets),
    }


class Sender:
    """Sends events. One for a process; `close` it."""

    def __init__(self, allowed: Sequence[Network], timeout_s: float) -> None:
        self._allowed, self._timeout_s = allowed, timeout_s
        self._resolver = Resolver()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # `limits` counts them
                ssl=ssl.create_default_context(),
                resolver=_ResolvesNothing(),
                keepalive_timeout=IDLE_S,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_AHEAD,
        )

    async def close(self) -> None:
        await self._http.close()
        await self._resolver.aclose()

    async def send(self, url: str, headers: Mapping[str, str], body: str) -> Outcome:
        """Try once. Raises OwnTrouble; anything that the receiver does is an Outcome."""
        began, at = time.monotonic(), int(time.time())

        def outcome(error: str) -> Outcome:
            return Outcome(Attempt(at, round(1000 * (time.monotonic() - began)), error=error[:KEPT]))

        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                status, answer, later = await self._post(Destination.parse(url), headers, body, limit)
        except (aiohttp.ClientError, OSError, ValueError, Unresolved, _Refused) as error:
            if getattr(error, "errno", None) in OURS:
                raise OwnTrouble(str(error)) from error
            return outcome(self._describe_error(error))
        return Outcome(Attempt(at, round(1000 * (time.monotonic() - began)), status, answer), later)

    def _describe_error(self, error: Exception) -> str:
        if isinstance(error, aiohttp.ServerDisconnectedError):
            return "the receiver closed the connection before it answered"
        if isinstance(error, aiohttp.ClientResponseError):  # its text has the URL, whose path may be a secret
            return f"the receiver's answer is not HTTP: {error.message}"
        if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
            return f"no answer within {self._timeout_s:g} s"
        return str(error) or type(error).__name__

    async def _post(
        self, destination: Destination, headers: Mapping[str, str], body: str, limit: asyncio.Timeout
    ) -> tuple[int, str, float | None]:
        """Status, the answer's beginning, and seconds of its Retry-After."""
        addresses = await self._resolver.resolve(destination.host)
        why = refusal(destination.scheme, destination.port, addresses, self._allowed)
        if why is not None:
            raise _Refused(why)
        *others, last = addresses[:ADDRESSES]
        for address in others:
            with suppress(aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):  # nothing was sent
                return await self._post_to(address, destination, headers, body, limit)
        return await self._post_to(last, destination, headers, body, limit)

    async def _post_to(
        self, address: Address, destination: Destination, headers: Mapping[str, str], body: str, limit: asyncio.Timeout
    ) -> tuple[int, str, float | None]:
        host = f"[{address}]" if address.version == 6 else str(address)
        async with self._http.post(
            URL(f"{destination.scheme}://{host}:{destination.port}{destination.target}", encoded=True),
            data=body.encode(),
            headers={**headers, "host": destination.authority},
            server_hostname=destination.host if destination.scheme == "https" else None,
            allow_redirects=False,
        ) as response:
            limit.reschedule(None)  # the status decides whether it was delivered; the body has a limit of its own
            answer, whole = await _beginning(response)
            if not whole:
                response.close()  # else aiohttp would read the rest
            return response.status, answer, retry_after(response.headers.get("retry-after"))


async def _beginning(response: aiohttp.ClientResponse) -> tuple[str, bool]:
    """The answer's first KB as text, and whether that was all of it."""
    beginning = b""
    try:
        async with asyncio.timeout(BODY_S):
            while len(beginning) <= KEPT and (more := await response.content.read(KEPT + 1 - len(beginning))):
                beginning += more
    except (TimeoutError, aiohttp.ClientError, OSError):
        return beginning[:KEPT].decode(errors="replace"), False
    return beginning[:KEPT].decode(errors="replace"), len(beginning) <= KEPT


def next_delay(schedule: Sequence[float], tries: int, retry_after_s: float | None) -> float | None:
    """Seconds until the next try after `tries` failed ones; None if that was the last.

    A Retry-After makes it later, never sooner.
    """
    if tries >= len(schedule):
        return None
    requested = min(retry_after_s or 0.0, MAX_RETRY_AFTER_S)
    return max(schedule[tries], requested) * random.uniform(1.0, 1.0 + JITTER)  # noqa: S311 - spreads load


def retry_after(header: str | None) -> float | None:
    """Seconds that a Retry-After header (RFC 9110, 10.2.3) asks for: a number or a date. None for anything else."""
    if header is None:
        return None
    text = header.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):  # such as a year of twenty digits
        return None
    return max(0.0, at - time.time())
