"""The open streams: counted and bounded; ended when the gateway stops, or when the key that opened them lets nobody
in any more.

    enter: whose it is, and whether that one may have another ─▶ its key's id and its secret's digest
                                                    every LOOK_S: all keys that have streams ─▶ their streams stop
    leave: at the request's end

A stream is a request that stays open for longer than its own work takes: events as they come, on SSE or a WebSocket, an
answer that is waited for, a file that is downloaded. A process bounds those of one tenant (all of its keys together),
of one address where no keys are asked for, and all of them. A key and a tenant may have a bound of their own beside
that, `max_streams`. The bounds are checked before any work is done.

So an answer that is under way ends within about a second after its key was revoked, disabled, or rotated away, or has
expired. One command asks the store for 500 keys, however many streams each has. While the store is away, streams go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.steps import FAILURES
from producers.connection.hosts import network_of
from producers.connection.log_throttle import warn_throttled
from producers.gateway.http.connection import cut
from producers.gateway.http.errors import RETRY_AFTER, Problem, unavailable
from producers.gateway.metrics import Stream
from producers.store.access import api_keys
from producers.store.access.api_keys import Credentials
from producers.store.access.principal import LOCAL, NO_LIMITS, Limits, Principal

logger = logging.getLogger(__name__)

#: Time (s) between two looks at the keys of open streams.
LOOK_S: Final = 0.75
#: Time (s) for which a client may still take what is sent once its key has ended; then its connection is cut.
LAST_S: Final = 1.0
#: Keys that one command asks for.
AT_ONCE: Final = 500
#: Name in a connection's state of the key that opened it; its secret is hashed where a stream is entered.
OPENED: Final = "opened"
#: A stream's end: None where the gateway stops or the client has left.
Stop = asyncio.Future[Problem | None]

#: Name in a connection's state of its stream's end.
STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most streams of one gateway process. 0: any number."""

    in_all: int = 0
    each: int = 0
    """The most of one tenant; of one address (of IPv6: 64 bits) where no keys are asked for."""

    def within(self, connections: int) -> Bounds:
        """These bounds for a gateway that takes so many connections: a quarter of them is left to other requests, and
        no tenant or address may have more than half of all streams."""
        in_all = min(self.in_all or connections, max(2, connections * 3 // 4))
        return Bounds(in_all, min(self.each or in_all, in_all // 2))


@dataclass(slots=True)
class _Open:
    kind: Stream
    whose: Hashable
    key: str | None
    opened: Credentials | None
    scope: MutableMapping[str, Any]


async def _unlimited(tenant: str | None) -> Limits:
    return NO_LIMITS


class Streams:
    """The open streams of a gateway, and the keys that opened them. `limits_of`: asks for a tenant's limits."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self.bounds = bounds
        self.limits_of: Callable[[str | None], Awaitable[Limits]] = _unlimited
        self._open: dict[Stop, _Open] = {}
        self._counts: Counter[Hashable] = Counter()
        self._of_keys: Counter[str | None] = Counter()
        self._kinds: Counter[Stream] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, kind: Stream) -> int:
        """Returns the number of open streams of a kind."""
        return self._kinds[kind]

    def end(self) -> None:
        """End all streams; their clients may resume them at another gateway."""
        for stop in self._open:
            if not stop.done():
                stop.set_result(None)

    async def enter(self, scope: MutableMapping[str, Any], kind: Stream) -> Stop:
        """The end of a request's stream, which begins at the first call. `scope`: the request's. Raises Problem where
        as many are open as may be, and redis.exceptions.RedisError or OSError where the tenant's limits cannot be
        read."""
        state = scope.setdefault("state", {})
        if (existing := state.get(STOP)) is not None:
            return existing  # type: ignore[no-any-return]  # a state holds anything
        principal: Principal = state.get("principal", LOCAL)
        network = network_of((scope.get("client") or ("nobody",))[0])
        whose: Hashable = (network,) if principal.key is None else principal.tenant
        in_all, each, of_key = self.bounds.in_all, self.bounds.each, principal.limits.max_streams
        if of_key is not None and self._of_keys[principal.key] >= of_key:
            raise _over_limit(of_key, "key")
        if each and self._counts[whose] >= each:
            raise _too_many(each, principal)
        if in_all and len(self._open) >= in_all:
            raise _full(in_all)
        stop: Stop = asyncio.get_running_loop().create_future()
        state[STOP] = stop
        self._open[stop] = _Open(kind, whose, principal.key, api_keys.credentials_of(state.get(OPENED)), scope)
        self._counts[whose] += 1
        self._of_keys[principal.key] += 1
        self._kinds[kind] += 1
        if principal.key is not None:
            # It counts while the limits are read: requests that wait for a store that is away are bounded, too.
            of_tenant = (await self.limits_of(principal.tenant)).max_streams
            if of_tenant is not None and self._counts[whose] > of_tenant:
                self.leave(scope)  # before the next one looks, so that as many as may be get in
                raise _over_limit(of_tenant, "tenant")
        return stop

    def leave(self, scope: Mapping[str, Any]) -> None:
        """The request has ended. Does nothing for one without a stream."""
        stop = scope.get("state", {}).get(STOP)
        if stop is None or (stream := self._open.pop(stop, None)) is None:
            return
        self._kinds[stream.kind] -= 1
        self._counts[stream.whose] -= 1
        if not self._counts[stream.whose]:
            del self._counts[stream.whose]
        self._of_keys[stream.key] -= 1
        if not self._of_keys[stream.key]:
            del self._of_keys[stream.key]

    def keys(self) -> set[str]:
        """The ids of keys that have open streams."""
        return {stream.opened.id for stream in self._open.values() if stream.opened is not None}

    def end_of(self, keys_by_id: Mapping[str, api_keys.Key | None]) -> None:
        """End the streams of those of these keys that do not let their holder in now."""
        now = time.time()
        for stop, stream in self._open.items():
            opened = stream.opened
            if opened is not None and opened.id in keys_by_id and not stop.done():
                key = keys_by_id[opened.id]
                if key is None or not key.accepts(opened.digest, now):
                    stop.set_result(ended())
                    asyncio.get_running_loop().call_later(LAST_S, self._cut, stop)

    def _cut(self, stop: Stop) -> None:
        if (stream := self._open.get(stop)) is not None:
            cut(stream.scope)

    async def watch(self, store: Redis) -> None:
        """End streams whose keys have ended, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            ids = sorted(self.keys())
            for start in range(0, len(ids), AT_ONCE):
                try:
                    self.end_of(await api_keys.several(store, ids[start : start + AT_ONCE]))
                except FAILURES as error:
                    warn_throttled(logger, "cannot look at the keys of open streams: %s", error)


def _too_many(limit: int, principal: Principal) -> Problem:
    whose = "this address" if principal.key is None else "this tenant"
    message = f"This gateway has {limit} streams and waiting requests of {whose} open, which is all that it takes; "
    return Problem(429, f"{message}close some, or try again later.", code="too_many_streams", headers=RETRY_AFTER)


def _over_limit(limit: int, whose: str) -> Problem:
    message = f"This {whose} may have {limit} streams and waiting requests open at one gateway, its max_streams; "
    return Problem(429, f"{message}close some, or try again later.", code="too_many_streams", headers=RETRY_AFTER)


def _full(limit: int) -> Problem:
    message = (
        f"This gateway has {limit} streams and waiting requests open, which is all that it takes; try again later."
    )
    return unavailable(message, code="gateway_full")


def ended() -> Problem:
    return Problem(401, "This key does not work any more, so the answer ends here.", code="invalid_api_key")


def why_stopped(stop: Stop) -> Problem | None:
    """Returns the error for the client of a stream that stops; None unless the end of its key stopped it."""
    return stop.result() if stop.done() else None
