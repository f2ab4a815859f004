"""Shares one pub/sub connection among all readers of a process, and reconnects it when it fails.

A subscription becomes `stale` when it may have missed messages: after its SUBSCRIBE was confirmed, after a reconnect,
and after its reader let too many pile up. Missed messages are in the stream, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

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
    """One reader's queue of messages."""

    __slots__ = ("_awake", "_inbox", "_size", "_waiter", "channel", "closed", "stale")

    def __init__(self, channel: bytes) -> None:
        self.channel = channel
        self.stale = False
        self.closed = False
        self._inbox: deque[bytes] = deque()
        self._size = 0
        self._awake = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, payload: bytes) -> None:
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

    async def take(self, patience_s: float) -> list[bytes] | None:
        """Returns the new messages; None if the stream must be read, after possible losses or silence."""
        if not self._awake:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(patience_s, self._end_wait)  # asyncio.timeout costs several times as much
            try:
                await self._waiter
            finally:
                timer.cancel()
            if not self._awake:
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

    def follow(self, task_id: str) -> Subscription:
        """Subscribe to a task; `stale` is set as soon as messages flow. Call `leave` when done.

        Raises PenstockError once closed.
        """
        if self._closed:
            raise PenstockError(CLOSED)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="penstock hub")
        name = keys.channel(task_id).encode()
        subscription = Subscription(name)
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
            connection = self._store.connection_pool.make_connection()
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

    async def _obey(self, connection: AbstractConnection) -> None:
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

    async def _listen(self, connection: AbstractConnection) -> None:
        while True:
            self._heed(await connection.read_response(disconnect_on_error=False))

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
