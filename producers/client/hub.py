"""Shares one pub/sub connection among all readers of a process, and reconnects it when it fails. On a channel of its
own, what a worker's step makes comes in one message for all tasks that the process has entered itself for:

    SUBSCRIBE to the task's channel, FOLLOW -> heard of the task on the process's channel: UNSUBSCRIBE
    its worker gives it back, a large entry, silence, a new connection
                                    -> SUBSCRIBE again; once that is confirmed, the stream is read

So a task whose worker is of the release before, which knows the task's own channel alone, is heard there. A lost FOLLOW
loses nothing either.

All messages that one read of the connection has are handed out in one step of the event loop: to a reader's queue, or
past it, where its reader waits and has a shortcut (`producers.client.reader.Shortcut`).

A subscription becomes `stale` when it may have missed messages: after its SUBSCRIBE was confirmed, after a reconnect,
and after its reader let too many pile up. Missed messages are in the stream, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.steps import FAILURES, backoff
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import aexecute, arun
from producers.connection.trouble import NotPrimary
from producers.contract import keys
from producers.errors import PenstockError
from producers.store.protocol import follow

log = logging.getLogger(__name__)

#: Most messages that wait for one reader, and most bytes of them. Beyond that they are dropped, and the reader reads
#: the stream.
BACKLOG: Final = 1000
BACKLOG_BYTES: Final = 1 << 18
#: Interval (s) of pings on a quiet connection. It is reconnected if no answer came by the next ping.
PING_S: Final = 5.0
CLOSED: Final = "the client is closed"
#: Prefix of the names of tasks' channels.
CHANNEL: Final = keys.channel("").encode()
#: Most tasks in one FOLLOW, since a script blocks the store.
MANY: Final = 1000


class Subscription:
    """One reader's queue of messages.

    `shortcut`: called with a message that comes while `take` waits; returns whether it took it, so that `take` goes on
    waiting. It may not raise.
    """

    __slots__ = (
        "_awake",
        "_heard_at",
        "_inbox",
        "_size",
        "_waiter",
        "closed",
        "shortcut",
        "silent",
        "stale",
        "task_id",
    )

    def __init__(self, task_id: bytes, shortcut: Callable[[bytes], bool] | None = None) -> None:
        self.task_id = task_id
        self.shortcut = shortcut
        self.stale = False
        self.silent = False
        """Whether `take` last returned after silence."""
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
        self.silent = not self._awake and not await self._message(patience_s)
        if self.silent:
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
    """A task's channel. `live`: messages flow. `own`: it is subscribed to, or will be; else the task is heard of on the
    process's channel. `entered`: the store has said since that the process follows the task. Until then, a message may
    be the last one before an earlier reader's leave takes effect."""

    __slots__ = ("entered", "live", "own", "readers")

    def __init__(self, *, entered: bool) -> None:
        self.readers: set[Subscription] = set()
        self.live = False
        self.own = True
        self.entered = entered


class Hub:
    """The subscriptions of a process, by task. It connects at the first one. Call it from one event loop only."""

    def __init__(self, store: Redis) -> None:
        self._store = store
        #: Channels by task id.
        self._channels: dict[bytes, _Channel] = {}
        self._orders: list[tuple[str, bytes]] = []
        self._ordered = asyncio.Event()
        self._name = secrets.token_hex(8)
        self._process = keys.process_channel(self._name).encode()
        #: Whether the process's channel is heard: until then, APPEND would forget who enters.
        self._heard = asyncio.Event()
        #: Task -> whether this process is to follow it.
        self._entries: dict[bytes, bool] = {}
        self._entered = asyncio.Event()
        self._doubtful = False
        #: Channel -> number of unconfirmed SUBSCRIBEs. Messages flow from the last one's confirmation on.
        self._unconfirmed: dict[bytes, int] = {}
        self._last_reply_at = 0.0
        self._replies = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def follower(self) -> str | None:
        """Value of a record's `followers` with which this process hears of the task from its first token on; None while
        its channel is not heard."""
        return self._name if self._heard.is_set() else None

    def follow(
        self, task_id: str, shortcut: Callable[[bytes], bool] | None = None, *, entered: bool = False
    ) -> Subscription:
        """Subscribe to a task; `stale` is set as soon as messages flow. Call `leave` when done. `shortcut`: as of
        `Subscription`. `entered`: the task is yet to be submitted, with `follower` in its record.

        Raises PenstockError once closed.
        """
        if self._closed:
            raise PenstockError(CLOSED)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="penstock hub")
        name = task_id.encode()
        subscription = Subscription(name, shortcut)
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel(entered=entered)
            self._order("SUBSCRIBE", name)
            if not entered:
                self._enter(name)
        elif channel.live:
            subscription.mark_stale()
        channel.readers.add(subscription)
        return subscription

    def leave(self, subscription: Subscription, *, ended: bool = False) -> None:
        """`ended`: the task has, so that nothing will come of it, whoever follows it."""
        name = subscription.task_id
        channel = self._channels.get(name)
        if channel is None or subscription not in channel.readers:
            return
        channel.readers.remove(subscription)
        if not channel.readers:
            del self._channels[name]
            if channel.own:
                self._order("UNSUBSCRIBE", name)
            if ended:
                self._entries.pop(name, None)
            else:
                self._enter(name, on=False)

    def doubt(self, subscription: Subscription) -> None:
        """After long silence, ask the store whether it hears this process, listen to the task's own channel again, and
        follow it anew."""
        self._doubtful = True
        self._entered.set()
        channel = self._channels.get(subscription.task_id)
        if channel is not None and not channel.own:
            self._listen_to(subscription.task_id, channel)
            self._enter(subscription.task_id)

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

    def _order(self, verb: str, task_id: bytes) -> None:
        self._orders.append((verb, CHANNEL + task_id))
        self._ordered.set()

    def _listen_to(self, task_id: bytes, channel: _Channel) -> None:
        channel.own = True
        self._order("SUBSCRIBE", task_id)

    def _enter(self, task_id: bytes, *, on: bool = True) -> None:
        if b"\n" not in task_id:  # no task that we submit, but one that a plain Celery sender made may be called so
            self._entries[task_id] = on
            self._entered.set()
            if on:
                self._channels[task_id].entered = False

    async def _run(self) -> None:
        attempt = 0
        while True:
            connection: Any = self._store.connection_pool.make_connection()
            self._orders = [("SUBSCRIBE", self._process)]
            self._ordered.set()
            for name, channel in self._channels.items():
                self._listen_to(name, channel)
                self._enter(name)
            self._unconfirmed.clear()
            self._replies = 0
            try:
                async with asyncio.timeout(SILENT_S):  # a server may accept the connection and never answer
                    await connection.connect()
                self._last_reply_at = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._listen(connection))
                    group.create_task(self._obey(connection))
                    group.create_task(self._follow_entered())
            except* FAILURES as failures:
                # Readers go on meanwhile: after some seconds of silence they read the stream.
                warn_throttled(log, "pub/sub connection lost, connecting again: %s", failures.exceptions[0])
            finally:
                self._heard.clear()
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

    async def _follow_entered(self) -> None:
        """Tell the store which tasks this process follows. What fails is left: the tasks are heard on their own
        channels."""
        while True:
            await self._heard.wait()
            await self._entered.wait()
            self._entered.clear()
            if self._doubtful:
                self._doubtful = False
                await self._check_heard()
            entries, self._entries = self._entries, {}
            for on in (True, False):
                names = [name.decode() for name, entered in entries.items() if entered is on]
                for start in range(0, len(names), MANY):
                    try:
                        async with asyncio.timeout(SILENT_S):
                            part = names[start : start + MANY]
                            answers = await arun(self._store, follow(self._name, part, on=on))
                    except NotPrimary:  # so may be the server that the hub listens to
                        raise
                    except FAILURES as error:
                        warn_throttled(log, "cannot follow tasks together: %s", error)
                        continue
                    for name, answer in zip(part, answers, strict=True):
                        if answer and (channel := self._channels.get(name.encode())) is not None:
                            channel.entered = True

    async def _check_heard(self) -> None:
        """Raise ConnectionError if the store has no listener of this process: the connection leads to a server that was
        demoted, where only some messages come, or nothing does any more."""
        try:
            async with asyncio.timeout(SILENT_S):
                _, listeners = await aexecute(self._store, "PUBSUB", "NUMSUB", self._process)
        except FAILURES as error:  # it is away, or its user may not ask
            log.debug("cannot ask the store who listens: %s", error)
            return
        if not listeners:
            raise ConnectionError("the store does not hear this process there")

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
        if name == self._process:
            if kind == b"message":
                self._heed_lines(reply[2].split(b"\n"))
            else:
                self._heard.set()
            return
        channel = self._channels.get(name[len(CHANNEL) :])
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

    def _heed_lines(self, lines: list[bytes]) -> None:
        """A message of the process's channel (`_followers.lua`). What a later release may add behind pairs is left."""
        for task_id, message in zip(lines[::2], lines[1::2], strict=False):
            channel = self._channels.get(task_id)
            if channel is None:
                self._enter(task_id, on=False)
                continue
            if channel.own and channel.entered and message:
                channel.own = False
                self._order("UNSUBSCRIBE", task_id)
            elif not message and not channel.own:
                self._listen_to(task_id, channel)
            for subscription in channel.readers if message else ():
                subscription.put(message)
