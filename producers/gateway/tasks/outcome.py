"""Builds a final task's JSON piece by piece.

    stream, a page at a time -> each token's JSON, by choice -> `large`: sent in chunks

A result may have tens of megabytes as JSON and many times that as objects, and building it must not block the loop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import Any, Final, Protocol

from starlette.responses import Response

from producers.client.aio import AsyncHandle
from producers.contract.record import Record
from producers.contract.stream import Chunk, End, Event, Prompt, Token, logprobs_view, prompt_view, row_view, rows_of
from producers.gateway.context import Gateway
from producers.gateway.fair_share import in_thread, turn
from producers.gateway.tasks import large
from producers.gateway.tasks.views import TaskView
from producers.store.usage.prices import Prices

#: Made once: `json.dumps` makes one for each call that is given separators.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


async def answer(gateway: Gateway, handle: AsyncHandle, record: Record, **more: bool) -> Response:
    """The response for a final record, with the fields `more` added. Raises as `collected`."""
    outcome = Outcome(record, more, gateway.prices)
    if record.chunks and record.status == "completed":
        return await _in_chunks(gateway, handle, outcome)
    return await collected(gateway, handle, outcome, outcome.pieces)


async def _in_chunks(gateway: Gateway, handle: AsyncHandle, outcome: Outcome) -> Response:
    """The response for a parent whose texts are done: a chunk's rows are in memory at a time."""
    chunks = [event async for event in handle.stream() if isinstance(event, Chunk)]

    async def pieces() -> AsyncGenerator[bytes]:
        yield b"".join(outcome.head())
        for chunk in chunks:
            rows = await gateway.client.rows(chunk)
            encoded = await in_thread(_json, [row_view(row) for row in rows])
            yield (b"[" if chunk.number == 0 else b",") + encoded[1:-1]
        yield b"]}"

    release = await large.turn(gateway, gateway.settings.patience)
    return large.Streamed(pieces(), gateway.settings.stall, release)


def _large(event: Event) -> bool:
    return isinstance(event, Prompt) or (isinstance(event, End) and event.result is not None)


class Collecting(Protocol):
    """Builds a JSON answer from all events of a task. `size`: bytes so far."""

    @property
    def size(self) -> int: ...

    def take(self, events: Sequence[Event]) -> None: ...


async def collected(
    gateway: Gateway, handle: AsyncHandle, outcome: Collecting, pieces: Callable[[], Iterator[bytes | bytearray]]
) -> Response:
    """The response of an answer that is collected from an ended task's stream. `pieces`: its JSON then.

    Raises TaskNotFound, Problem, redis.exceptions.RedisError or OSError.
    """
    release: Callable[[], None] | None = None
    try:
        async with aclosing(handle.batches()) as batches:
            async for events in batches:
                await turn()
                if any(_large(event) for event in events):  # one may be larger than a slice
                    await in_thread(outcome.take, events)
                else:
                    outcome.take(events)
                if release is None and outcome.size > large.LARGE:
                    release = await large.turn(gateway, gateway.settings.patience)
        return large.Sent(pieces(), gateway.settings.stall, release, gateway.body_room)
    except BaseException:
        if release is not None:
            release()
        raise


class Outcome:
    """Collects a task's result: `take` all events, then read `pieces`. `size`: bytes so far."""

    def __init__(self, record: Record, more: Mapping[str, bool], prices: Prices | None = None) -> None:
        self._record = record
        self._prices = prices
        self._more = more
        self._choices = [_Choice() for _ in range(record.n)]
        self._prompt = bytearray()
        self._rows = b"null"

    @property
    def size(self) -> int:
        return len(self._prompt) + len(self._rows) + sum(choice.size for choice in self._choices)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self._choices[event.choice].take(event)
            elif isinstance(event, Prompt):
                for token in prompt_view(event.token_ids, event.logprobs):
                    self._prompt += b"," if self._prompt else b""
                    self._prompt += _json(token)
            elif isinstance(event, End) and event.result is not None:
                self._rows = _json([row_view(row) for row in rows_of(event.result)])

    def pieces(self) -> Iterator[bytes | bytearray]:
        """The JSON of a TaskView."""
        yield from self.head()
        yield self._rows
        yield b"}"

    def head(self) -> Iterator[bytes | bytearray]:
        """That JSON up to its rows."""
        view = TaskView.of(self._record)
        if self._prices is not None and (cost := self._prices.of_record(self._record)) is not None:
            view.cost, view.currency = format(cost.normalize(), "f"), self._prices.currency
        head = view.model_dump_json(exclude={"choices", "prompt_logprobs", "rows"})
        yield head[:-1].encode()
        for name, value in self._more.items():
            yield b',"%b":%b' % (name.encode(), _json(value))
        yield b',"choices":['
        reasons = self._record.json("reasons") or []
        for index, choice in enumerate(self._choices):
            reason = reasons[index] if index < len(reasons) else None
            yield b"," if index else b""
            yield from choice.pieces(index, reason)
        yield b'],"prompt_logprobs":'
        if self._prompt:
            yield b"["
            yield self._prompt
            yield b"]"
        else:
            yield b"null"
        yield b',"rows":'


class _Choice:
    """One choice's parts as JSON, without the brackets and quotes around them."""

    __slots__ = ("_count", "_ids", "_logprobs", "_scored", "_text")

    def __init__(self) -> None:
        self._text = bytearray()
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._count = 0
        self._scored = False

    @property
    def size(self) -> int:
        return len(self._text) + len(self._ids) + len(self._logprobs)

    def take(self, token: Token) -> None:
        self._text += quote(token.text)[1:-1].encode()
        self._ids += b",%d" % token.token_id if self._count else b"%d" % token.token_id
        self._count += 1
        if token.logprobs is None:
            if self._scored:
                self._logprobs += b",null"
            return
        if not self._scored:
            self._scored = True
            self._logprobs += b"null," * (self._count - 1)
        else:
            self._logprobs += b","
        self._logprobs += _json(logprobs_view(token.logprobs))

    def pieces(self, index: int, reason: str | None) -> Iterator[bytes | bytearray]:
        yield b'{"index":%d,"text":"' % index
        yield self._text
        yield b'","token_ids":['
        yield self._ids
        yield b'],"finish_reason":%b,"logprobs":' % (b"null" if reason is None else quote(reason).encode())
        if self._scored:
            yield b"["
            yield self._logprobs
            yield b"]}"
        else:
            yield b"null}"


def _json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()
