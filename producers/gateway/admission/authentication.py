"""Callers: finds the Principal of a request's key, within a second of what the store says of it.

    token ─▶ id, secret ─▶ the key as the store had it at most FRESH_S ago ─▶ its digest compared ─▶ Principal

A key that is revoked at one gateway ends at all of them within FRESH_S. While the store is away, keys that opened go on
for REMEMBERED_S after its last word on them; a wrong secret of theirs is answered 401, all others 503, never let in.
Keys of the scope `metrics` alone go on for OBSERVED_S, so that Prometheus still reads penstock_up meanwhile.
Wrong keys are answered alike whatever is wrong with them, and ever more slowly to one address. A flood of them costs
the store little: those that come while LOOKS commands are under way share the next one. So nobody waits long for the
store because others guess, and who has a good key is let in also from an address of which all wait.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, TypeVar

from redis.asyncio import Redis

from producers.client.steps import FAILURES
from producers.connection.addresses import network_of
from producers.connection.connect import SILENT_S
from producers.gateway.http.errors import Problem
from producers.gateway.lru_cache import LruCache
from producers.store.access import api_keys
from producers.store.access.api_keys import Key, Principal

T = TypeVar("T")
#: Reads a key by its id: the key, if there is one, and when (monotonic) the read began.
Get = Callable[[str], Awaitable[tuple[Key | None, float]]]

#: Time (s) for which a key counts as the store last had it.
FRESH_S: Final = 0.5
#: Time (s) for which a key that has opened goes on while the store is away: a gateway that alone is cut off from the
#: store does not know which keys end.
REMEMBERED_S: Final = 60.0
#: The same of a key of the scope `metrics` alone: without the store, /metrics has this gateway's own figures only.
OBSERVED_S: Final = 86_400.0
#: Keys, and addresses that sent wrong ones, that are remembered.
KEPT: Final = 10_000
#: The header of an answer to a caller without a good key (RFC 6750).
CHALLENGE: Final = {"www-authenticate": 'Bearer realm="penstock"'}
#: Wrong keys of one address in FORGIVEN_S that are answered at once; each further one waits longer, up to SLOWEST_S.
FREE: Final = 10
FORGIVEN_S: Final = 60.0
SLOWEST_S: Final = 2.0
#: Wrong keys that wait for their answers at once: of one address (of IPv6: of 64 bits), and of all. Each holds a
#: connection, so further ones are answered 429 at once.
PAUSED: Final = 16
PAUSED_IN_ALL: Final = 512
#: Commands that look for keys which have not opened here, at once; and keys that one of them asks for.
LOOKS: Final = 4
LOOKED_FOR: Final = 500
#: The principal of an unknown key, and until when it holds.
NOBODY: Final = (None, 0.0)


@dataclass(slots=True)
class _CachedKey:
    """A key as the store had it at `at`. `opened`: when it last let a caller in."""

    key: Key
    principal: Principal
    at: float
    opened: float = float("-inf")

    @property
    def until(self) -> float:
        """The time (monotonic) until which the key works while the store is away."""
        return self.opened + (OBSERVED_S if self.principal.scopes == {"metrics"} else REMEMBERED_S)


class Callers:
    """The callers of one gateway, by their keys. `sleep`: waits for some seconds."""

    def __init__(self, store: Redis, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        self._store = store
        self._sleep = sleep
        self._keys: dict[str, _CachedKey] = {}
        # Whole keys that let somebody in a moment ago, and until when (monotonic) they do so again. A dict finds them
        # by a hash that nobody outside can foretell, so its time says nothing of a secret.
        self._recent: dict[str, tuple[Principal | None, float]] = {}
        self._looks: LruCache[str, _CachedKey | None] = LruCache(KEPT, fresh=FRESH_S)
        self._wrong: dict[str, tuple[int, float]] = {}
        self._paused: Counter[str] = Counter()
        # Keys that the next command is to look for; and how many commands are under way.
        self._sought: dict[str, asyncio.Future[tuple[Key | None, float]]] = {}
        self._looking = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def again(self, token: str | None) -> Principal | None:
        """Returns the holder of a key that has opened, if the store's last answer about it is fresh: the usual case."""
        principal, until = self._recent.get(token or "", NOBODY)
        return principal if time.monotonic() < until else None

    def tenant_before(self, token: str | None) -> str | None:
        """Returns the tenant of a key that has let a caller in here, maybe long ago: it may not work any more."""
        principal, _ = self._recent.get(token or "", NOBODY)
        return None if principal is None else principal.tenant

    async def principal(self, token: str | None, address: str) -> Principal:
        """Returns the holder of a key. Raises Problem (401) for a wrong or missing key, and redis.exceptions.RedisError
        or OSError if the store does not answer. Of all requests with a key that opened a while ago, one looks it up."""
        if token in self._recent:
            opened = await self._looks.get(token, partial(self._opened, token, self._read_key))
        else:
            opened = await self._opened(token or "", self._with_others)
        if opened is None or opened.key.state(time.time()) != "active":
            raise await self._refusal(address, missing=not token)
        return opened.principal

    async def _opened(self, token: str, get: Get) -> _CachedKey | None:
        """Returns the key that a token opens; `get` reads it from the store.

        A secret that opens none is looked up anew each time: so every refusal takes the same time, and a secret that
        was made just now works at once.
        """
        if (read := api_keys.read_token(token)) is None:
            return None
        key_id, secret = read
        cached = self._keys.get(key_id)
        if cached is None or time.monotonic() - cached.at >= FRESH_S or not cached.key.opens(secret, time.time()):
            cached = await self._look(key_id, get)
        if cached is None or not cached.key.opens(secret, time.time()):
            self._recent.pop(token, None)
            return None
        cached.opened = cached.at
        seconds = FRESH_S if cached.key.expires_at is None else min(FRESH_S, cached.key.expires_at - time.time())
        _put(self._recent, token, (cached.principal, cached.at + seconds))
        return cached

    async def _look(self, key_id: str, get: Get) -> _CachedKey | None:
        """Returns the key as the store has it now. The result of a later look goes before that. While the store is
        away, the last result counts."""
        began = time.monotonic()
        try:
            key, began = await get(key_id)
        except FAILURES:
            cached = self._keys.get(key_id)
            if cached is None or began > cached.until:
                raise
            return cached
        cached = self._keys.get(key_id)
        if cached is not None and cached.at > began:
            return cached
        if key is None:
            self._keys.pop(key_id, None)
            return None
        fresh = _CachedKey(key, key.principal(), began, float("-inf") if cached is None else cached.opened)
        _put(self._keys, key_id, fresh)
        return fresh

    async def _read_key(self, key_id: str) -> tuple[Key | None, float]:
        """Returns a key, and when its read began. Raises redis.exceptions.RedisError or OSError."""
        began = time.monotonic()
        async with asyncio.timeout(SILENT_S):
            return await api_keys.get(self._store, key_id), began

    async def _with_others(self, key_id: str) -> tuple[Key | None, float]:
        """Read a key as `_read_key` does, by a command that is shared with other requests at this time."""
        if (sought := self._sought.get(key_id)) is None:
            sought = self._sought[key_id] = asyncio.get_running_loop().create_future()
            if self._looking < LOOKS:
                self._looking += 1
                look = asyncio.create_task(self._look_for_all(), name="look for keys")
                self._tasks.add(look)  # asyncio keeps none
                look.add_done_callback(self._tasks.discard)
        return await asyncio.shield(sought)

    async def _look_for_all(self) -> None:
        """Look for keys until none is sought."""
        try:
            while ids := list(islice(self._sought, LOOKED_FOR)):
                sought = [self._sought.pop(key_id) for key_id in ids]
                began = time.monotonic()
                try:
                    async with asyncio.timeout(SILENT_S):
                        keys_by_id = await api_keys.several(self._store, ids)
                except FAILURES as error:
                    for future in sought:
                        future.set_exception(error)
                        future.exception()  # or asyncio complains where all who asked have left
                else:
                    for key_id, future in zip(ids, sought, strict=True):
                        future.set_result((keys_by_id[key_id], began))
                finally:
                    for future in sought:
                        future.cancel()  # does nothing to those that are done
        finally:
            self._looking -= 1

    async def _refusal(self, address: str, *, missing: bool = False) -> Problem:
        """Returns the answer to a caller without a good key, after a pause for wrong keys."""
        if not missing:
            return await self._wrong_key(network_of(address))
        message = "A key is missing: send it in the header `Authorization: Bearer psk_...`."
        return Problem(401, message, code="missing_api_key", headers=CHALLENGE)

    async def _wrong_key(self, address: str) -> Problem:
        pause = self._pause(address)
        if self._paused[address] >= PAUSED or self._paused.total() >= PAUSED_IN_ALL:
            message = "Too many wrong keys come from this address, or from all; this is one of them."
            return Problem(429, message, code="too_many_wrong_keys", headers={"retry-after": f"{SLOWEST_S:g}"})
        self._paused[address] += 1
        try:
            await self._sleep(pause)
        finally:
            self._paused[address] -= 1
            if not self._paused[address]:
                del self._paused[address]
        return Problem(
            401,
            "This key does not work: it is unknown, wrong, expired, disabled or revoked.",
            code="invalid_api_key",
            headers=CHALLENGE,
        )

    def _pause(self, address: str) -> float:
        """Seconds that the next wrong key of this address waits."""
        now = time.monotonic()
        count, since = self._wrong.get(address, (0, now))
        count, since = (1, now) if now - since > FORGIVEN_S else (count + 1, since)
        _put(self._wrong, address, (count, since))
        return 0.0 if count <= FREE else min(SLOWEST_S, 0.1 * 2.0 ** min(count - FREE, 10))


def _put(kept: dict[str, T], name: str, value: T) -> None:
    """Keep a value as the latest one; the one that was put longest ago makes room."""
    kept.pop(name, None)
    kept[name] = value
    if len(kept) > KEPT:
        del kept[next(iter(kept))]
