"""Reading one task's events from any position, each once and in order, however connections fare.

    read the stream -> ended: done
                    -> follow the channel -> on doubt (gap, reconnect, silence, overflow): read the stream

A stream that was compacted (`producers.sweeper.compact`) is read as its blocks. Both are asked for, the stream first:
as one takes the other's place at once, the first that is there holds all.

The first read serves finished tasks without a subscription. When the subscription is confirmed the stream is read
again, so that nothing falls between the two; what came on both ways is dropped by its position.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from producers.client.hub import Hub, Subscription
from producers.client.operations import not_found
from producers.client.steps import Read, Steps, persistently
from producers.contract import keys
from producers.contract.blocks import BLOCK, unpack
from producers.contract.events import End, Event, decode, decode_message, stream_position

T = TypeVar("T")
#: By position; None for an entry of a kind that this version does not know.
Entries = list[tuple[int, Event | None]]

#: Positions are 64-bit in the store, and an entry's id is one more.
MAX_POSITION: Final = (1 << 63) - 2
#: Stream entries read at a time.
CHUNK: Final = 1000
#: More bytes at a time are parsed in a thread: others on the event loop are served meanwhile. Log probabilities of a
#: long prompt are megabytes.
INLINE: Final = 1 << 16
#: Bytes of a stream in one of a block, about.
SQUEEZED: Final = 5
#: After this long without a word (s) the stream is read, whatever pub/sub says.
SILENCE_S: Final = 5.0
#: A store that is away for longer than this (s) ends a reader with its error.
PATIENCE_S: Final = 60.0


class Cursor:
    """Where a reader is, without its I/O.

    `behind`: the stream has to be read, what comes from the channel does not connect. `ended`: nothing more will come.
    """

    __slots__ = ("behind", "ended", "position", "task_id")

    def __init__(self, task_id: str, start: int) -> None:
        if type(start) is not int or not 0 <= start <= MAX_POSITION:
            raise ValueError(f"a stream starts at a position from 0 to {MAX_POSITION}, not {start!r}")
        self.task_id = task_id
        self.position = start
        self.behind = True
        self.ended = False

    @property
    def block(self) -> int:
        """The number of the block that holds what is next."""
        return self.position // BLOCK

    def query(self) -> Read:
        """The record's end is asked for before the entries: if it is set, the terminal entry was there to be read. The
        stream is asked for before what it may have become."""
        return Read(
            (
                ("HMGET", keys.task(self.task_id), "status", "end"),
                ("XRANGE", keys.stream(self.task_id), f"{self.position + 1}-0", "+", "COUNT", CHUNK),
                ("HGET", keys.result(self.task_id), self.block),
            )
        )

    def replay(
        self, record: tuple[bytes | None, bytes | None], entries: Entries, compacted: bool = False
    ) -> list[Event]:
        """Events from `query`'s answer: the record's status and end, and the entries of the stream, or of a block where
        it was `compacted`. Raises TaskNotFound."""
        status, end = record
        if status is None:
            self.ended = True
            raise not_found(self.task_id)
        before = self.position
        events = self._take(entries)
        more = self.position > before if compacted else len(entries) == CHUNK
        self.behind = not self.ended and more
        if end is not None and not self.behind:
            self.ended = True
        return events

    def live(self, messages: list[Entries]) -> list[Event]:
        """Events from channel messages."""
        events: list[Event] = []
        for entries in messages:
            if entries[0][0] > self.position:
                self.behind = True
                break
            events += self._take(entries)
        return events

    def _take(self, entries: Entries) -> list[Event]:
        events: list[Event] = []
        for position, event in entries:
            if position < self.position or self.ended:
                continue
            self.position = position + 1
            if event is not None:
                events.append(event)
            self.ended = isinstance(event, End)
        return events


def read_entries(found: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> Entries:
    """What XRANGE answered."""
    places = ((stream_position(name), json.loads(fields[b"e"])) for name, fields in found)
    return [(position, decode(position, entry)) for position, entry in places]


def read_block(number: int, block: bytes) -> Entries:
    """What stands in a compacted stream's block."""
    return [(position, decode(position, entry)) for position, entry in unpack(number, block)]


def read_messages(payloads: Iterable[bytes]) -> list[Entries]:
    """What came on the channel."""
    return [[(place, decode(place, entry)) for place, entry in decode_message(payload)] for payload in payloads]


class Reader:
    """`next` until it gives nothing, then `close` (also before). One task at a time may call it."""

    def __init__(self, ask: Callable[[Steps[Any]], Awaitable[Any]], hub: Hub, task_id: str, start: int) -> None:
        self._cursor = Cursor(task_id, start)
        self._ask = ask
        self._hub = hub
        self._subscription: Subscription | None = None

    async def next(self) -> list[Event]:
        """The next events, as many as there are; none once the stream has ended.

        Raises TaskNotFound; redis.exceptions.RedisError where the store stays away; PenstockError once closed.
        """
        cursor = self._cursor
        while not cursor.ended:
            events: list[Event] = []
            if cursor.behind:
                record, found, block = await self._ask(persistently(cursor.query(), PATIENCE_S))
                if found or block is None:
                    size = sum(len(fields[b"e"]) for _, fields in found)
                    events = cursor.replay(record, await _parsed(size, read_entries, found))
                else:
                    parse = partial(read_block, cursor.block)
                    events = cursor.replay(record, await _parsed(SQUEEZED * len(block), parse, block), compacted=True)
            elif self._subscription is None:
                self._subscription = self._hub.follow(cursor.task_id)
            else:
                payloads = await self._subscription.take(SILENCE_S)
                if payloads is None:
                    cursor.behind = True
                else:
                    events = cursor.live(await _parsed(sum(map(len, payloads)), read_messages, payloads))
            if events:
                return events
        return []

    def close(self) -> None:
        if self._subscription is not None:
            self._hub.leave(self._subscription)


async def _parsed(size: int, parse: Callable[[Any], T], what: Any) -> T:
    """In a thread, nothing is touched but what was read: a reader may be cancelled at any point, and go on."""
    return parse(what) if size <= INLINE else await asyncio.to_thread(parse, what)
