"""Reading one task's events from any position, each once and in order, however connections fare.

    read the stream -> ended: done
                    -> follow the channel -> on doubt (gap, reconnect, silence, overflow): read the stream

The first read serves finished tasks without a subscription. When the subscription is confirmed the stream is read
again, so that nothing falls between the two; what came on both ways is dropped by its position.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from producers import keys
from producers.events import End, Event, decode, decode_message, stream_position
from producers.hub import Hub, Subscription
from producers.operations import not_found
from producers.steps import Read, Steps, persistently

#: Positions are 64-bit in the store, and an entry's id is one more.
MAX_POSITION: Final = (1 << 63) - 2
#: Stream entries read at a time.
CHUNK: Final = 1000
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

    def query(self) -> Read:
        """The record's end is asked for before the entries: if it is set, the terminal entry was there to be read."""
        return Read(
            (
                ("HMGET", keys.task(self.task_id), "status", "end"),
                ("XRANGE", keys.stream(self.task_id), f"{self.position + 1}-0", "+", "COUNT", CHUNK),
            )
        )

    def replay(self, answer: list[Any]) -> list[Event]:
        """Events from `query`'s answer. Raises TaskNotFound."""
        (status, end), entries = answer
        if status is None:
            self.ended = True
            raise not_found(self.task_id)
        events = self._take((stream_position(name), json.loads(fields[b"e"])) for name, fields in entries)
        self.behind = not self.ended and len(entries) == CHUNK
        if end is not None and not self.behind:
            self.ended = True
        return events

    def live(self, payloads: list[bytes]) -> list[Event]:
        """Events from channel messages."""
        events: list[Event] = []
        for payload in payloads:
            entries = decode_message(payload)
            if entries[0][0] > self.position:
                self.behind = True
                break
            events += self._take(entries)
        return events

    def _take(self, entries: Iterable[tuple[int, Any]]) -> list[Event]:
        events: list[Event] = []
        for position, entry in entries:
            if position < self.position or self.ended:
                continue
            self.position = position + 1
            event = decode(position, entry)
            if event is not None:
                events.append(event)
            self.ended = isinstance(event, End)
        return events


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
                events = cursor.replay(await self._ask(persistently(cursor.query(), PATIENCE_S)))
            elif self._subscription is None:
                self._subscription = self._hub.follow(cursor.task_id)
            else:
                payloads = await self._subscription.take(SILENCE_S)
                if payloads is None:
                    cursor.behind = True
                else:
                    events = cursor.live(payloads)
            if events:
                return events
        return []

    def close(self) -> None:
        if self._subscription is not None:
            self._hub.leave(self._subscription)
