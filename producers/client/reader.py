"""Reads one task's events from any position, each once and in order, also across lost connections.

    read the stream -> ended: done
                    -> follow the channel -> on doubt (gap, reconnect, silence, overflow): read the stream

A compacted stream (`producers.sweeper.compact`) is read as blocks, from the store or from the blob that a reference
there names. Each read asks for the stream first and then for the block. Blocks replace a stream in one step, so the
first of the two that exists is complete.

Existing entries are read in slices of about SLICE bytes, by connections of which the process has few; the next slice
is read when the caller has taken the last one. So a reader of a long stream holds one slice, and the event loop is soon
free again.

The first read serves finished tasks without a subscription. When the subscription is confirmed, the stream is read
again, so that nothing is lost between the two. Events that came twice are dropped by their position.

While a reader waits for the channel, tokens may pass by it (`Shortcut`): in the step of the event loop in which they
come, without waking a task. All that is no mere token, or does not go on at its position, wakes it as before.

**The hub.** Shares one pub/sub connection among all readers of a process, and reconnects it when it fails. On a channel
of its own, what a worker's step makes comes in one message for all tasks that the process has entered itself for:

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
import json
import logging
import secrets
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from redis.asyncio import Redis

from producers.client.operations import not_found
from producers.client.steps import FAILURES, Fetch, Read, Steps, backoff, persistently
from producers.connection.aws import AwsNotInstalled
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import aexecute, arun
from producers.connection.trouble import NotPrimary
from producers.contract import keys
from producers.contract.record import BROKEN
from producers.contract.stream import (
    BLOCK,
    End,
    Event,
    Token,
    decode,
    decode_message,
    plain_tokens,
    stream_position,
    unpack,
)
from producers.errors import BrokenRecord, PenstockError, ResultUnavailable
from producers.store.blobs import BlobNotFound
from producers.store.protocol import follow
from producers.store.references import Reference

log = logging.getLogger(__name__)

#: Most messages that wait for one reader, and most bytes of them. Beyond that they are dropped, and the reader reads
#: the stream.
BACKLOG: Final = 1000
BACKLOG_BYTES: Final = 1 << 18
#: Interval (s) of pings on a quiet connection. It is reconnected if no answer came by the next ping.
PING_S: Final = 5.0
CLOSED: Final = "the client is closed"
#: What the names of tasks' channels begin with.
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
        #: By task.
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
        """What a record's `followers` are to be, so that this process hears of the task from its first token on; None
        while its channel is not heard."""
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
        """Nothing came for long: ask the store whether it hears this process, listen to the task's own channel again,
        and follow it anew."""
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


T = TypeVar("T")
#: (position, event); None for an entry of a kind that this version does not know.
Entries = list[tuple[int, Event | None]]

#: Highest start position: entry ids are 64-bit, and an id is the position + 1.
MAX_POSITION: Final = (1 << 63) - 2
#: Bytes of entries that are read and given at a time: about a millisecond's work, parsing and sending included. For the
#: work of an entry beside that of its bytes, it counts as so many more.
SLICE: Final = 1 << 14
ENTRY: Final = 50
#: Entries that are read first, before their size is known.
FIRST: Final = 16
#: Most bytes parsed on the event loop; more are parsed in a thread. A piece of a prompt's log probabilities has many.
INLINE: Final = 1 << 16
#: Largest block (bytes) that a reader keeps until all of its slices are taken; a larger one is read again for each.
KEPT: Final = 1 << 18
#: Estimated bytes of entries in one byte of a block.
SQUEEZED: Final = 5
#: Silence (s) on the channel after which the stream is read.
SILENCE_S: Final = 5.0
#: Time (s) after which an unreachable store ends a reader with an error.
PATIENCE_S: Final = 60.0


class Shortcut(Protocol):
    """Takes tokens that come while a reader waits for them, in place of `Reader.next`."""

    @property
    def free(self) -> bool:
        """Whether it can take tokens now. `send` is called at once if it can."""
        ...

    def send(self, tokens: list[Token]) -> None:
        """Take these tokens. May not raise."""
        ...


class Cursor:
    """A reader's position and state, without I/O.

    `behind`: the stream must be read, since messages of the channel do not continue at `position`. `ended`: no more
    events will come. `count`: how many entries of the stream are read next.
    """

    __slots__ = ("behind", "count", "ended", "position", "task_id")

    def __init__(self, task_id: str, start: int) -> None:
        if type(start) is not int or not 0 <= start <= MAX_POSITION:
            raise ValueError(f"a stream starts at a position from 0 to {MAX_POSITION}, not {start!r}")
        self.task_id = task_id
        self.position = start
        self.behind = True
        self.ended = False
        self.count = FIRST

    @property
    def block(self) -> int:
        """The number of the block that holds the next position."""
        return self.position // BLOCK

    def query(self) -> Read:
        """The commands that read the next entries.

        The record's end is read before the entries: if it is set, the terminal entry was already there. The stream is
        read before the block that may replace it.
        """
        return Read(
            (
                ("HMGET", keys.task(self.task_id), "status", "end"),
                ("XRANGE", keys.stream(self.task_id), f"{self.position + 1}-0", "+", "COUNT", self.count),
                ("HMGET", keys.result(self.task_id), self.block, "blob"),
            ),
            bulk=True,
        )

    def replay(self, record: tuple[bytes | None, bytes | None], entries: Entries, more: bool | None) -> list[Event]:
        """New events in the answer to `query`. Raises TaskNotFound.

        `record`: its status and end. `entries`: of the stream, or of a block. `more`: whether others follow them, as
        far as that is known; of a block it is not, and they do where it had any.
        """
        status, end = record
        if status is None:
            self.ended = True
            raise not_found(self.task_id)
        before = self.position
        events = self._take(entries)
        if more is None:
            more = self.position > before
        self.behind = not self.ended and more
        if end is not None and not self.behind:
            self.ended = True
        return events

    def live(self, messages: list[Entries]) -> list[Event]:
        """New events in channel messages."""
        events: list[Event] = []
        for entries in messages:
            if entries[0][0] > self.position:
                self.behind = True
                break
            events += self._take(entries)
        return events

    def next_tokens(self, message: bytes) -> list[Token] | None:
        """The tokens of a channel message that goes on at `position` and has nothing but tokens, without log
        probabilities or a finish reason. None for another one: it is for `live`."""
        tokens = plain_tokens(message, self.position)
        if tokens:
            self.position += len(tokens)
        return tokens

    def _take(self, entries: Entries) -> list[Event]:
        events: list[Event] = []
        for position, event in entries:
            if self.ended:
                break
            self.ended = isinstance(event, End)  # also where it is before the start
            if position < self.position:
                continue
            self.position = position + 1
            if event is not None:
                events.append(event)
        return events


def read_entries(answer: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> Entries:
    """The entries in XRANGE's answer."""
    parsed = json.loads(b"[%b]" % b",".join([fields[b"e"] for _, fields in answer]))  # one call costs a third of many
    positions = [stream_position(name) for name, _ in answer]
    return [(position, decode(position, entry)) for position, entry in zip(positions, parsed, strict=True)]


def read_block(number: int, block: bytes, start: int = 0, max_bytes: int | None = None) -> Entries:
    """The entries in a compacted stream's block from position `start` on. `max_bytes`: see `unpack`."""
    return [(position, decode(position, entry)) for position, entry in unpack(number, block, start, max_bytes, ENTRY)]


def first_slice(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> tuple[int, int]:
    """Number of entries of XRANGE's answer that make a slice, at least one if there are any; and the size of all."""
    count = size = 0
    for _, fields in entries:
        if size < SLICE:
            count += 1
        size += len(fields[b"e"]) + ENTRY
    return count, size


def read_messages(payloads: Iterable[bytes]) -> list[Entries]:
    """The entries in channel messages."""
    return [
        [(position, decode(position, entry)) for position, entry in decode_message(payload)] for payload in payloads
    ]


class Reader:
    """Reads a task's events: call `next` until it returns none, then `close`. One caller at a time.

    `shortcut`: is given the tokens that come while `next` waits for the channel, before those that `next` returns then.
    """

    def __init__(
        self,
        perform: Callable[[Steps[Any]], Awaitable[Any]],
        hub: Hub,
        task_id: str,
        start: int,
        shortcut: Shortcut | None = None,
    ) -> None:
        self._cursor = Cursor(task_id, start)
        self._perform = perform
        self._hub = hub
        self._shortcut = shortcut
        self._subscription: Subscription | None = None
        #: The block that is being given, by its number, and its record.
        self._block: tuple[int, bytes, Any] | None = None

    def expect(self) -> str | None:
        """Listen for a task that is yet to be submitted. Returns what its record's `followers` are to be; None if its
        stream will be read first, as any other's. Raises PenstockError once closed."""
        follower = self._hub.follower
        if follower is not None:
            self._subscription = self._hub.follow(self._cursor.task_id, entered=True)
        return follower

    def submits(self) -> None:
        """The task is about to be submitted, so that nothing was published yet, nor missed."""
        if self._subscription is not None:
            self._subscription.stale = False
            self._cursor.behind = False

    def pass_to(self, shortcut: Shortcut | None) -> None:
        """Set the shortcut of a reader that expected its task."""
        if self._subscription is not None and shortcut is not None:
            self._subscription.shortcut = partial(self._pass_on, shortcut)

    async def next(self) -> list[Event]:
        """Returns the next events, all that are there; an empty list once the stream has ended.

        Raises TaskNotFound, BrokenRecord, redis.exceptions.RedisError if the store stays away, ResultUnavailable,
        OSError if the storage of the result's file stays away, and PenstockError once closed.
        """
        cursor = self._cursor
        while not cursor.ended:
            events: list[Event] = []
            if cursor.behind:
                record, entries, block = await self._read()
                if entries or block is None:
                    events = cursor.replay(record, *await self._sliced(entries))
                else:
                    parse = partial(read_block, cursor.block, start=cursor.position, max_bytes=SLICE)
                    events = cursor.replay(record, await self._parsed(SQUEEZED * len(block), parse, block), None)
            elif self._subscription is None:
                direct = None if self._shortcut is None else partial(self._pass_on, self._shortcut)
                self._subscription = self._hub.follow(cursor.task_id, direct)
            else:
                payloads = await self._subscription.take(SILENCE_S)
                if payloads is None:
                    cursor.behind = True
                    if self._subscription.silent:
                        self._hub.doubt(self._subscription)
                else:
                    events = cursor.live(await self._parsed(sum(map(len, payloads)), read_messages, payloads))
            if events:
                return events
        return []

    def _pass_on(self, shortcut: Shortcut, message: bytes) -> bool:
        """Give a message's tokens to the shortcut. Called while `next` waits: the cursor is neither behind nor at the
        end."""
        if len(message) > SLICE or not shortcut.free or (tokens := self._cursor.next_tokens(message)) is None:
            return False
        shortcut.send(tokens)
        return True

    async def _sliced(self, entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> tuple[Entries, bool]:
        """Returns the first slice of entries, parsed, and whether more follow. Entries beyond it are read again."""
        cursor = self._cursor
        count, size = first_slice(entries)
        more = count < len(entries) or len(entries) == cursor.count
        if entries:
            cursor.count = max(1, SLICE * len(entries) // size)
        return await self._parsed(size, read_entries, entries[:count]), more

    async def _read(self) -> tuple[Any, Any, bytes | None]:
        """The record's state, the next entries of the stream, and the next block if there is no stream."""
        if self._block is not None and self._block[0] == self._cursor.block:
            await asyncio.sleep(0)  # let other tasks run
            return self._block[2], (), self._block[1]
        self._block = None
        record, entries, (block, moved) = await self._perform(persistently(self._cursor.query(), PATIENCE_S))
        if not entries and block is None and moved is not None:
            reference = Reference.parse(moved)
            try:
                block = await self._perform(persistently(Fetch(reference, self._cursor.block), PATIENCE_S))
            except (BlobNotFound, AwsNotInstalled, ValueError) as error:
                record, entries, _ = await self._perform(persistently(self._cursor.query(), PATIENCE_S))
                if record[0] is not None:  # else the task was removed meanwhile, which `replay` says
                    raise _unavailable(self._cursor.task_id, reference, error) from error
        if not entries and block is not None and len(block) <= KEPT:
            self._block = self._cursor.block, block, record
        return record, entries, block

    async def _parsed(self, size: int, parse: Callable[[Any], T], payload: Any) -> T:
        """Parse an answer, a large one in a thread. This changes no state, so a cancelled reader can go on. Raises
        BrokenRecord for entries that no script wrote."""
        try:
            return parse(payload) if size <= INLINE else await asyncio.to_thread(parse, payload)
        except (*BROKEN, LookupError, zlib.error) as error:
            raise BrokenRecord(self._cursor.task_id, "stream") from error

    def close(self, *, ended: bool = False) -> None:
        """`ended`: the task has, or is about to, or was not submitted after all."""
        if self._subscription is not None:
            self._hub.leave(self._subscription, ended=ended or self._cursor.ended)


def _unavailable(task_id: str, reference: Reference, error: Exception) -> ResultUnavailable:
    return ResultUnavailable(
        f"The result of task {task_id} is in {reference.place}, as {reference.name}, and cannot be read from here: "
        f"{error}. Give the client the sweeper's place (files_dir, or FILES_DIR), or read it from a gateway."
    )
