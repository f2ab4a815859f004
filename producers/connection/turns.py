"""Turns at a scarce resource, such as connections or permits for large answers. Owners that wait get it by turns.

    OWNER ─▶ Turns.take: at once, while there are free places and the owner is below its limit
          ─▶ Turns.wait: the owners that wait get the next free place one after the other, each its first waiter

So a caller with a thousand requests under way delays another caller's by one of them, not by a thousand.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final

from redis.exceptions import ConnectionError

#: The owner of this process's own work, which has no limit.
PROCESS: Final = ""
#: Owner of the current work: a gateway sets the caller's tenant, or its network before that is known, for each request.
OWNER: Final[ContextVar[Hashable]] = ContextVar("owner", default=PROCESS)


class Busy(ConnectionError):
    """No place became free in time: nothing was sent."""


class Turns:
    """`places`: how many may be taken at once, and `each`: by one owner. Use it on one event loop."""

    __slots__ = ("_each", "_free", "_taken_by", "_waiting", "places")

    def __init__(self, places: int, each: int) -> None:
        self.places = self._free = places
        self._each = each
        self._taken_by: dict[Hashable, int] = {}
        #: The owners that wait, the next one first.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @property
    def free(self) -> int:
        return self._free

    @property
    def waiting(self) -> int:
        """The number of waiters for a place."""
        return sum(not waiter.done() for waiters in self._waiting.values() for waiter in waiters)

    def take(self, owner: Hashable) -> bool:
        """Take a place if one is free for this owner."""
        if owner in self._waiting or not self._may(owner):
            return False
        self._free -= 1
        self._taken_by[owner] = self._taken_by.get(owner, 0) + 1
        return True

    async def wait(self, owner: Hashable, patience_s: float) -> None:
        """Take a place once it is this owner's turn. Raises Busy after `patience_s` seconds."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(waiter)
        self._next()  # all earlier waiters may have left
        timer = loop.call_later(patience_s, _end, waiter, patience_s)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give(owner)
            raise
        finally:
            timer.cancel()

    def give(self, owner: Hashable) -> None:
        """Give a place back."""
        count = self._taken_by[owner] - 1
        if count:
            self._taken_by[owner] = count
        else:
            del self._taken_by[owner]
        self._free += 1
        if self._waiting:
            self._next()

    @asynccontextmanager
    async def turn(self, patience_s: float) -> AsyncIterator[None]:
        """A place for this task's owner. Raises Busy."""
        owner = OWNER.get()
        if not self.take(owner):
            await self.wait(owner, patience_s)
        try:
            yield
        finally:
            self.give(owner)

    def _may(self, owner: Hashable) -> bool:
        return self._free > 0 and (owner == PROCESS or self._taken_by.get(owner, 0) < self._each)

    def _next(self) -> None:
        """Give free places to those whose turn it is."""
        for owner in list(self._waiting):
            waiters = self._waiting[owner]
            while waiters and waiters[0].done():
                waiters.popleft()
            if waiters and not self._may(owner):
                continue
            del self._waiting[owner]
            if waiters:
                self._free -= 1
                self._taken_by[owner] = self._taken_by.get(owner, 0) + 1
                waiters.popleft().set_result(None)
                if waiters:
                    self._waiting[owner] = waiters


def _end(waiter: asyncio.Future[None], waited_s: float) -> None:
    if not waiter.done():
        waiter.set_exception(Busy(f"none became free within {waited_s:g} s"))
