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
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from producers.client.hub import Hub, Subscription
from producers.client.operations import not_found
from producers.client.steps import Fetch, Read, Steps, persistently
from producers.connection.aws import AwsNotInstalled
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
from producers.errors import BrokenRecord, ResultUnavailable
from producers.store.blobs import BlobNotFound
from producers.store.references import Reference

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
