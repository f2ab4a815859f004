"""A task's stream as server-sent events (WHATWG HTML, 9.2).

    id: 7
    event: token
    data: {"position":7,"choice":0,"index":7,"token_id":318,"text":" is"}

A `prompt` event, before the first token, holds a part of the prompt's log probabilities, where they were asked for.
`id` is the position, which a client sends back as `Last-Event-ID` to go on behind it. After the event `end` nothing
follows; a stream that closes without it is to be taken up again. `error` says why it closes. JSON is in ASCII, because
many clients split lines at U+2028 and the like, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.contract.stream import Event, Prompt, Token, logprobs_view, prompt_view
from producers.errors import PenstockError
from producers.gateway.fair_share import SHARE, Share, measured, turn
from producers.gateway.http.connection import LiveBody, cut, live_body
from producers.gateway.http.errors import Problem, body_of, problem_of
from producers.gateway.http.streams import Stop, Streams, why_stopped

logger = logging.getLogger(__name__)

#: Sent where there was nothing to send for a while; clients ignore a comment.
HEARTBEAT: Final = b": still here\n\n"
#: Silence (s) after which a stream first says what it waits for.
FIRST_S: Final = 4.0
#: The first line: the time (ms) after which an EventSource reconnects.
PREAMBLE = b"retry: 1000\n\n"
#: The JSON schema of an event, for OpenAPI.
EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "description": "the position; an error has none"},
        "event": {"enum": ["prompt", "token", "end", "error"]},
        "data": {"type": "string", "description": "JSON"},
    },
}


def named(event: Event) -> tuple[str, str]:
    """An event's name and JSON. A token's is built by hand, since this runs for every token of every reader."""
    if isinstance(event, Token):
        more = "" if event.logprobs is None else f',"logprobs":{json.dumps(logprobs_view(event.logprobs))}'
        if event.finish_reason is not None:
            more += f',"finish_reason":{quote(event.finish_reason)}'
        return (
            "token",
            f'{{"position":{event.position},"choice":{event.choice},"index":{event.index},'
            f'"token_id":{event.token_id},"text":{quote(event.text)}{more}}}',
        )
    if isinstance(event, Prompt):
        part = {
            "position": event.position,
            "first": event.first,
            "tokens": prompt_view(event.token_ids, event.logprobs),
        }
        return "prompt", json.dumps(part)
    end = {
        "position": event.position,
        "status": event.status,
        "finish_reasons": event.reasons,
        "usage": event.usage,
        "error": event.error,
    }
    return "end", json.dumps(end)


def encode(event: Event) -> str:
    """An event as SSE lines."""
    name, data = named(event)
    return f"id: {event.position}\nevent: {name}\ndata: {data}\n\n"


class Feed:
    """Gives chunks as they come, or a heartbeat after some silence (s), until they end or `stop` is set.

    `waits`: tells what the stream waits for, or nothing. It is asked after FIRST_S of silence, and at each heartbeat.

    One task reads all chunks, and one timer runs: a task and a timer for each chunk took as long as all other work.
    A chunk waits for its caller's turn here, so that heartbeats go on meanwhile.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        stop: asyncio.Future[Any],
        heartbeat: float,
        waits: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._stop = stop
        self._heartbeat = heartbeat
        self._waits = waits
        self._asking: asyncio.Task[None] | None = None
        self._comment = HEARTBEAT
        self._ready: bytes | None = None
        self._delivered = True
        """Whether the last chunk was taken, so that the next one may be read."""
        self._quiet = False
        self._waiting = False
        """Whether `next` waits."""
        self._error: Exception | None = None
        self._wakeup, self._requested = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._last_read_at = self._loop.time()
        self._silence = heartbeat if waits is None else min(heartbeat, FIRST_S)
        """Time (s) of silence until the next comment."""
        self._timer = self._loop.call_later(self._silence, self._beat)
        self._task = asyncio.create_task(measured(self._pump, chunks))
        for end in (stop, self._task):
            end.add_done_callback(self._wake)

    @property
    def ended(self) -> bool:
        return self._task.done()

    @property
    def idle(self) -> bool:
        """Whether `next` waits, and there is nothing yet that it will return."""
        return self._waiting and not (
            self._quiet or self._ready is not None or self._error is not None or self._stop.done() or self._task.done()
        )

    def passed(self) -> None:
        """Something was sent past `next`, while it waits: the silence begins anew."""
        self._last_read_at = self._loop.time()
        self._comment = HEARTBEAT

    def fail(self, error: Exception) -> None:
        """Let `next` raise this error."""
        self._error = error
        self._wakeup.set()

    async def next(self) -> bytes | None:
        """The next chunk; None at the end. Raises what the chunks raise. The reader has taken the one before."""
        self._last_read_at = self._loop.time()
        if self._delivered:
            self._delivered = False
            self._requested.set()
        while True:
            if self._error is not None:
                raise self._error
            if self._ready is not None:
                chunk, self._ready, self._delivered = self._ready, None, True
                return chunk
            if self._task.done():
                self._task.result()
                return None
            if self._stop.done():
                return None
            if self._quiet:
                self._quiet, comment, self._comment = False, self._comment, HEARTBEAT
                return comment
            self._wakeup.clear()
            self._waiting = True
            try:
                await self._wakeup.wait()
            finally:
                self._waiting = False

    async def close(self) -> None:
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # or asyncio complains that nobody asked

    async def _pump(self, chunks: AsyncGenerator[bytes]) -> None:
        while True:
            await self._requested.wait()
            self._requested.clear()
            chunk = await anext(chunks, None)
            if chunk is None:
                return
            await turn()
            self._ready, self._quiet, self._comment = chunk, False, HEARTBEAT  # what it waited for has come
            self._wakeup.set()

    def _wake(self, _: object) -> None:
        self._wakeup.set()

    def _beat(self) -> None:
        remaining_s = self._last_read_at + self._silence - self._loop.time()
        if remaining_s <= 0:
            if self._waits is None:
                self._quiet = True
                self._wakeup.set()
            elif self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(self._waits))
            remaining_s = self._silence = self._heartbeat
        self._timer = self._loop.call_later(remaining_s, self._beat)

    async def _ask(self, waits: Callable[[], Awaitable[str]]) -> None:
        """Let the next comment say what is waited for, unless a chunk comes first."""
        asked_at = self._last_read_at
        try:
            text = await waits()
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader is to know that this stream lives
            warn_throttled(logger, "cannot tell what a stream waits for: %s", error)
            text = ""
        if self._ready is None and asked_at == self._last_read_at:
            self._comment = f": waits for: {text}\n\n".encode() if text else HEARTBEAT
            self._quiet = True
            self._wakeup.set()


class Direct:
    """Sends a stream's tokens in the step of the event loop in which they come, while the stream waits for them: past
    its chunks and both of its tasks, whose switches take longer than all other work for a token. Implements
    `producers.client.reader.Shortcut`.

    `encode`: makes the bytes of tokens, perhaps none; the chunks of later events follow them. Nothing goes this way
    before the answer has begun, while something else is to be sent or the client is slow to take it, while callers wait
    for their turns, and once the stream is to stop. The time is charged to the stream's caller.
    """

    __slots__ = ("_body", "_encode", "_feed", "_share")

    def __init__(self, encode: Callable[[list[Token]], bytes]) -> None:
        self._encode = encode
        self._feed: Feed | None = None
        self._body: LiveBody | None = None
        self._share: Share | None = None

    def begin(self, scope: Scope, feed: Feed) -> None:
        """The answer to this request has begun, and takes its chunks from this feed."""
        self._share = SHARE.get()
        self._body = live_body(scope)
        self._feed = feed

    @property
    def free(self) -> bool:
        feed, body, share = self._feed, self._body, self._share
        return (
            feed is not None
            and body is not None
            and feed.idle
            and body.writable
            and (share is None or not share.capped)
        )

    def send(self, tokens: list[Token]) -> None:
        began, feed, body = time.perf_counter(), self._feed, self._body
        assert feed is not None
        assert body is not None  # else it is not free
        try:
            if chunk := self._encode(tokens):
                body.write(chunk)
                feed.passed()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this stream, and no other one
            feed.fail(error)
        if self._share is not None:
            self._share.used += time.perf_counter() - began


class LiveStream(Response):
    """Sends chunks as they come, until they end, the client leaves, its key ends, or the gateway stops.

    While a slow client takes a chunk, `chunks` is not advanced. `opening`, `cut` and `broken` give the bytes to send
    before the first chunk, when the gateway stops, and for an error. `waits`: as of `Feed`. `direct`: sends tokens of
    this stream past the chunks.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        streams: Streams,
        *,
        heartbeat: float,
        stall: float,
        waits: Callable[[], Awaitable[str]] | None = None,
        direct: Direct | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._streams = streams
        self._heartbeat = heartbeat
        self._stall = stall
        self._waits = waits
        self._direct = direct
        self.init_headers({"x-accel-buffering": "no"})

    def opening(self) -> bytes:
        return b""

    def cut(self) -> bytes:
        return b""

    def broken(self, error: Exception) -> bytes:
        return f"event: error\ndata: {json.dumps(body_of(problem_of(error)))}\n\n".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stop = await self._streams.enter(scope, "events")
        leaving = asyncio.create_task(watch(receive, stop))
        try:
            async with aclosing(self._chunks), aclosing(self._sent(scope, stop)) as chunks:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in chunks:
                    async with asyncio.timeout(self._stall):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("dropped a stream whose reader took nothing for %s s", self._stall)
            cut(scope)
        finally:
            self._streams.leave(scope)
            leaving.cancel()

    async def _sent(self, scope: Scope, stop: Stop) -> AsyncGenerator[bytes]:
        if opening := self.opening():
            yield opening
        feed = Feed(self._chunks, stop, self._heartbeat, self._waits)
        if self._direct is not None:
            self._direct.begin(scope, feed)
        try:
            while (chunk := await feed.next()) is not None:
                yield chunk
            if not feed.ended and (ended := why_stopped(stop)) is not None:
                yield self.broken(ended)
            elif cut := self.cut() if not feed.ended else b"":
                yield cut
        except (Problem, PenstockError, *FAILURES) as error:
            yield self.broken(error)
        finally:
            await feed.close()


class EventStream(LiveStream):
    """A task's events as SSE. `first`: a batch that was read before the response began."""

    def __init__(
        self,
        batches: AsyncGenerator[list[Event]],
        streams: Streams,
        *,
        first: Sequence[Event] = (),
        heartbeat: float,
        stall: float,
        waits: Callable[[], Awaitable[str]] | None = None,
        direct: Direct | None = None,
    ) -> None:
        super().__init__(_encoded(batches), streams, heartbeat=heartbeat, stall=stall, waits=waits, direct=direct)
        self._first = first

    def opening(self) -> bytes:
        first, self._first = self._first, ()
        return PREAMBLE + encode_all(first)


async def _encoded(batches: AsyncGenerator[list[Event]]) -> AsyncGenerator[bytes]:
    async with aclosing(batches):
        async for events in batches:
            lines = encode_all(events)
            del events  # it takes several times as much, and a slow client may take long
            yield lines


def encode_all(events: Sequence[Event]) -> bytes:
    """Events as SSE lines."""
    return "".join(map(encode, events)).encode("ascii")


async def watch(receive: Receive, stop: Stop) -> None:
    """Wait until the client has gone, then set `stop`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not stop.done():
        stop.set_result(None)
