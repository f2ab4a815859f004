"""Shares one pub/sub connection among all readers of a process, and reconnects it when it fails.

All messages that one read of the connection has are handed out in one step of the event loop: to a reader's queue, or
past it, where its reader waits and has a shortcut (`producers.client.reader.Shortcut`).

A subscription becomes `stale` when it may have missed messages: after its SUBSCRIBE was confirmed, after a reconnect,
and after its reader let too many pile up. Missed messages are in the stream, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.steps import FAILURES, backoff
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.contract import keys
from producers.errors import PenstockError

log = logging.getLogger(__name__)

#: Most messages that wait for one reader, and most bytes of them. Beyond that they are dropped, and the reader reads
#: the stream.
BACKLOG: Final = 1000
BACKLOG_BYTES: Final = 1 << 18
#: Interval (s) of pings on a quiet connection. It is reconnected if no answer came by the next ping.
PING_S: Final = 5.0
CLOSED: Final = "the client is closed"


class Subscription:
    """One reader's queue of messages.

    `shortcut`: called with a message that comes while `take` waits; returns whether it took it, so that `take` goes on
    waiting. It may not raise.
    """

    __slots__ = ("_awake", "_heard_at", "_inbox", "_size", "_waiter", "channel", "closed", "shortcut", "stale")

    def __init__(self, channel: bytes, shortcut: Callable[[bytes], bool] | None = None) -> None:
        self.channel = channel
        self.shortcut = shortcut
        self.stale = False
        self.closed = False
        self._inbox: deque[bytes] = deque()
        self._size = 0
        self._awake = False
        self._waiter: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        """When (by the loop's clock) the shortcut took a message."""

    def put(self, payload: bytes) -> None:
        waiter = self._waiter
        waits = waiter is not None and not waiter.done() and not self._awake
        if waits and self.shortcut is not None and self.shortcut(payload):
            self._heard_at = asyncio.get_running_loop().time()
            return
        self._size += len(payload)
        if len(self._inbox) >= BACKLOG or self._size > BACKLOG_BYTES:
            self.mark_stale()
        self._inbox.append(payload)
        self._wake()

    def mark_stale(self) -> None:
        self._inbox.clear()
        self._size = 0
        self.stale = True
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._awake = True
        self._end_wait()

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _message(self, patience_s: float) -> bool:
        """Wait until there is something to take. False after so much silence."""
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            self._waiter = loop.create_future()
            timer = loop.call_at(heard_at + patience_s, self._end_wait)  # asyncio.timeout costs several times as much
            try:
                await self._waiter
            finally:
                self._waiter = None
                timer.cancel()
            if self._awake or self._heard_at <= heard_at:
                return self._awake
            heard_at = self._heard_at

    async def take(self, patience_s: float) -> list[bytes] | None:
        """Returns the new messages; None if the stream must be read, after possible losses or silence."""
        if not self._awake and not await self._message(patience_s):
            return None
        self._awake = False
        if self.closed:
            raise PenstockError(CLOSED)
        if self.stale:
            self.stale = False
            self._inbox.clear()
            self._size = 0
            return None
        payloads = list(self._inbox)
        self._inbox.clear()
        self._size = 0
        return payloads


class _Channel:
    __slots__ = ("live", "readers")

    def __init__(self) -> None:
        self.readers: set[Subscription] = set()
        self.live = False


class Hub:
    """The subscriptions of a process, by task. It connects at the first one. Call it from one event loop only."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        self._channels: dict[bytes, _Channel] = {}
        self._orders: list[tuple[str, bytes]] = []
        self._ordered = asyncio.Event()
        #: Channel -> number of unconfirmed SUBSCRIBEs. Messages flow from the last one's confirmation on.
        self._unconfirmed: dict[bytes, int] = {}
        self._last_reply_at = 0.0
        self._replies = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def follow(self, task_id: str, shortcut: Callable[[bytes], bool] | None = None) -> Subscription:
        """Subscribe to a task; `stale` is set as soon as messages flow. Call `leave` when done. `shortcut`: as of
        `Subscription`.

        Raises PenstockError once closed.
        """
        if self._closed:
            raise PenstockError(CLOSED)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="penstock hub")
        name = keys.channel(task_id).encode()
        subscription = Subscription(name, shortcut)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel()
            self._order("SUBSCRIBE", name)
        elif channel.live:
            subscription.mark_stale()
        channel.readers.add(subscription)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        name = subscription.channel
        channel = self._channels.get(name)
        if channel is None or subscription not in channel.readers:
            return
        channel.readers.remove(subscription)
        if not channel.readers:
            del self._channels[name]
            self._order("UNSUBSCRIBE", name)

    async def aclose(self) -> None:
        """End all subscriptions and the connection."""
        self._closed = True
        for channel in self._channels.values():
            for subscription in channel.readers:
                subscription.close()
        self._channels.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def _order(self, verb: str, name: bytes) -> None:
        self._orders.append((verb, name))
        self._ordered.set()

    async def _run(self) -> None:
        attempt = 0
        while True:
            connection: Any = self._store.connection_pool.make_connection()
            self._orders = [("SUBSCRIBE", name) for name in self._channels]
            self._ordered.set()
            self._unconfirmed.clear()
            self._replies = 0
            try:
                async with asyncio.timeout(SILENT_S):  # a server may accept the connection and never answer
                    await connection.connect()
                self._last_reply_at = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._listen(connection))
                    group.create_task(self._obey(connection))
            except* FAILURES as failures:
                # Readers go on meanwhile: after some seconds of silence they read the stream.
                warn_throttled(log, "pub/sub connection lost, connecting again: %s", failures.exceptions[0])
            finally:
                for channel in self._channels.values():
                    channel.live = False
                await connection.disconnect(nowait=True)
            if self._closed:  # a task group that fails while it is cancelled raises the failure, not CancelledError
                return
            attempt = 0 if self._replies else attempt + 1
            await asyncio.sleep(backoff(attempt))

    async def _obey(self, connection: Any) -> None:
        """Send the ordered commands in order. After a quiet PING_S, check that the server still answers."""
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    await self._ordered.wait()
            except TimeoutError:
                if time.monotonic() - self._last_reply_at > 2 * PING_S:
                    raise ConnectionError(f"no sign of life for {2 * PING_S:.0f} s") from None
                await connection.send_command("PING")
                continue
            self._ordered.clear()
            orders, self._orders = self._orders, []
            for verb, name in orders:
                if verb == "SUBSCRIBE":
                    self._unconfirmed[name] = self._unconfirmed.get(name, 0) + 1
            await connection.send_packed_command(connection.pack_commands(orders))

    async def _listen(self, connection: Any) -> None:
        async with aclosing(connection.replies()) as batches:
            async for replies in batches:
                for reply in replies:
                    self._heed(reply)

    def _heed(self, reply: Any) -> None:
        self._last_reply_at = time.monotonic()
        self._replies += 1
        if not isinstance(reply, list):
            return  # +PONG of a connection without subscriptions
        kind, name = reply[0], reply[1]
        channel = self._channels.get(name)
        if kind == b"message":
            if channel is not None:
                for subscription in channel.readers:
                    subscription.put(reply[2])
        elif kind == b"subscribe":
            unconfirmed = self._unconfirmed.pop(name) - 1
            if unconfirmed:
                self._unconfirmed[name] = unconfirmed
            elif channel is not None:
                channel.live = True
                for subscription in channel.readers:
                    subscription.mark_stale()
