"""Answers that stay open: a task's stream as server-sent events (WHATWG HTML, 9.2), and the bounds on all of them.

    id: 7
    event: token
    data: {"position":7,"choice":0,"index":7,"token_id":318,"text":" is"}

A `prompt` event, before the first token, holds a part of the prompt's log probabilities, where they were asked for.
`id` is the position, which a client sends back as `Last-Event-ID` to go on behind it. After the event `end` nothing
follows; a stream that closes without it is to be taken up again. `error` says why it closes. JSON is in ASCII, because
many clients split lines at U+2028 and the like, too.

**Open streams** are counted and bounded. They end when the gateway stops, or when the key that opened them lets nobody
in any more.

    enter: whose it is, and whether that one may have another ─▶ its key's id and its secret's digest
                                                    every LOOK_S: all keys that have streams ─▶ their streams stop
    leave: at the request's end

A stream is a request that stays open for longer than its own work takes: events as they come, on SSE or a WebSocket, an
answer that is waited for, a file that is downloaded. A process bounds those of one tenant (all of its keys together),
of one address where no keys are asked for, and all of them. A key and a tenant may have a bound of their own beside
that, `max_streams`. The bounds are checked before any work is done.

So an answer that is under way ends within about a second after its key was revoked, disabled, or rotated away, or has
expired. One command asks the store for 500 keys, however many streams each has. While the store is away, streams go on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any, ClassVar, Final

from redis.asyncio import Redis
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.client.steps import FAILURES
from producers.connection.addresses import network_of
from producers.connection.log_throttle import warn_throttled
from producers.contract.stream import Chunk, Event, Prompt, Token, logprobs_view, prompt_view
from producers.errors import PenstockError
from producers.gateway.fair_share import SHARE, Share, measured, turn
from producers.gateway.http.connection import LiveBody, cut, live_body
from producers.gateway.http.errors import RETRY_AFTER, Problem, body_of, problem_of, unavailable
from producers.gateway.metrics import Stream
from producers.store.access import api_keys
from producers.store.access.api_keys import LOCAL, NO_LIMITS, Credentials, Limits, Principal

logger = logging.getLogger(__name__)

#: Time (s) between two looks at the keys of open streams.
LOOK_S: Final = 0.75
#: Time (s) for which a client may still take what is sent once its key has ended; then its connection is cut.
LAST_S: Final = 1.0
#: Keys that one command asks for.
AT_ONCE: Final = 500
#: Name in a connection's state of the key that opened it; its secret is hashed where a stream is entered.
OPENED: Final = "opened"
#: A stream's end: None where the gateway stops or the client has left.
Stop = asyncio.Future[Problem | None]

#: Name in a connection's state of its stream's end.
STOP: Final = "stop"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most streams of one gateway process. 0: any number."""

    in_all: int = 0
    each: int = 0
    """The most of one tenant; of one address (of IPv6: 64 bits) where no keys are asked for."""

    def within(self, connections: int) -> Bounds:
        """These bounds for a gateway that takes so many connections: a quarter of them is left to other requests, and
        no tenant or address may have more than half of all streams."""
        in_all = min(self.in_all or connections, max(2, connections * 3 // 4))
        return Bounds(in_all, min(self.each or in_all, in_all // 2))


@dataclass(slots=True)
class _Open:
    kind: Stream
    whose: Hashable
    key: str | None
    opened: Credentials | None
    scope: MutableMapping[str, Any]


async def _unlimited(tenant: str | None) -> Limits:
    return NO_LIMITS


class Streams:
    """The open streams of a gateway, and the keys that opened them. `limits_of`: asks for a tenant's limits."""

    def __init__(self, bounds: Bounds = Bounds()) -> None:
        self.bounds = bounds
        self.limits_of: Callable[[str | None], Awaitable[Limits]] = _unlimited
        self._open: dict[Stop, _Open] = {}
        self._counts: Counter[Hashable] = Counter()
        self._of_keys: Counter[str | None] = Counter()
        self._kinds: Counter[Stream] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, kind: Stream) -> int:
        """Returns the number of open streams of a kind."""
        return self._kinds[kind]

    def end(self) -> None:
        """End all streams; their clients may resume them at another gateway."""
        for stop in self._open:
            if not stop.done():
                stop.set_result(None)

    async def enter(self, scope: MutableMapping[str, Any], kind: Stream) -> Stop:
        """The end of a request's stream, which begins at the first call. `scope`: the request's. Raises Problem where
        as many are open as may be, and redis.exceptions.RedisError or OSError where the tenant's limits cannot be
        read."""
        state = scope.setdefault("state", {})
        if (existing := state.get(STOP)) is not None:
            return existing  # type: ignore[no-any-return]  # a state holds anything
        principal: Principal = state.get("principal", LOCAL)
        network = network_of((scope.get("client") or ("nobody",))[0])
        whose: Hashable = (network,) if principal.key is None else principal.tenant
        in_all, each, of_key = self.bounds.in_all, self.bounds.each, principal.limits.max_streams
        if of_key is not None and self._of_keys[principal.key] >= of_key:
            raise _over_limit(of_key, "key")
        if each and self._counts[whose] >= each:
            raise _too_many(each, principal)
        if in_all and len(self._open) >= in_all:
            raise _full(in_all)
        stop: Stop = asyncio.get_running_loop().create_future()
        state[STOP] = stop
        self._open[stop] = _Open(kind, whose, principal.key, api_keys.credentials_of(state.get(OPENED)), scope)
        self._counts[whose] += 1
        self._of_keys[principal.key] += 1
        self._kinds[kind] += 1
        if principal.key is not None:
            # It counts while the limits are read: requests that wait for a store that is away are bounded, too.
            of_tenant = (await self.limits_of(principal.tenant)).max_streams
            if of_tenant is not None and self._counts[whose] > of_tenant:
                self.leave(scope)  # before the next one looks, so that as many as may be get in
                raise _over_limit(of_tenant, "tenant")
        return stop

    def leave(self, scope: Mapping[str, Any]) -> None:
        """The request has ended. Does nothing for one without a stream."""
        stop = scope.get("state", {}).get(STOP)
        if stop is None or (stream := self._open.pop(stop, None)) is None:
            return
        self._kinds[stream.kind] -= 1
        self._counts[stream.whose] -= 1
        if not self._counts[stream.whose]:
            del self._counts[stream.whose]
        self._of_keys[stream.key] -= 1
        if not self._of_keys[stream.key]:
            del self._of_keys[stream.key]

    def keys(self) -> set[str]:
        """The ids of keys that have open streams."""
        return {stream.opened.id for stream in self._open.values() if stream.opened is not None}

    def end_of(self, keys_by_id: Mapping[str, api_keys.Key | None]) -> None:
        """End the streams of those of these keys that do not let their holder in now."""
        now = time.time()
        for stop, stream in self._open.items():
            opened = stream.opened
            if opened is not None and opened.id in keys_by_id and not stop.done():
                key = keys_by_id[opened.id]
                if key is None or not key.accepts(opened.digest, now):
                    stop.set_result(ended())
                    asyncio.get_running_loop().call_later(LAST_S, self._cut, stop)

    def _cut(self, stop: Stop) -> None:
        if (stream := self._open.get(stop)) is not None:
            cut(stream.scope)

    async def watch(self, store: Redis) -> None:
        """End streams whose keys have ended, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            ids = sorted(self.keys())
            for start in range(0, len(ids), AT_ONCE):
                try:
                    self.end_of(await api_keys.several(store, ids[start : start + AT_ONCE]))
                except FAILURES as error:
                    warn_throttled(logger, "cannot look at the keys of open streams: %s", error)


def _too_many(limit: int, principal: Principal) -> Problem:
    whose = "this address" if principal.key is None else "this tenant"
    message = f"This gateway has {limit} streams and waiting requests of {whose} open, which is all that it takes; "
    return Problem(429, f"{message}close some, or try again later.", code="too_many_streams", headers=RETRY_AFTER)


def _over_limit(limit: int, whose: str) -> Problem:
    message = f"This {whose} may have {limit} streams and waiting requests open at one gateway, its max_streams; "
    return Problem(429, f"{message}close some, or try again later.", code="too_many_streams", headers=RETRY_AFTER)


def _full(limit: int) -> Problem:
    message = (
        f"This gateway has {limit} streams and waiting requests open, which is all that it takes; try again later."
    )
    return unavailable(message, code="gateway_full")


def ended() -> Problem:
    return Problem(401, "This key does not work any more, so the answer ends here.", code="invalid_api_key")


def why_stopped(stop: Stop) -> Problem | None:
    """Returns the error for the client of a stream that stops; None unless the end of its key stopped it."""
    return stop.result() if stop.done() else None


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
        "event": {"enum": ["prompt", "token", "chunk", "end", "error"]},
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
    if isinstance(event, Chunk):
        texts = {"position": event.position, "first": event.offset, "count": event.texts}
        return "chunk", json.dumps(texts)
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
    `comment`: the heartbeat; what `waits` tells is a comment of SSE.

    One task reads all chunks, and one timer runs: a task and a timer for each chunk took as long as all other work.
    A chunk waits for its caller's turn here, so that heartbeats go on meanwhile.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        stop: asyncio.Future[Any],
        heartbeat: float,
        waits: Callable[[], Awaitable[str]] | None = None,
        comment: bytes = HEARTBEAT,
    ) -> None:
        self._stop = stop
        self._usual = comment
        self._heartbeat = heartbeat
        self._waits = waits
        self._asking: asyncio.Task[None] | None = None
        self._comment = comment
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
        self._comment = self._usual

    def fail(self, error: Exception) -> None:
        """Let `next` raise this error."""
        self._error = error
        self._wakeup.set()

    async def next(self) -> bytes | None:
        """The next chunk; None at the end. Raises what the chunks raise. The reader has taken the one before."""
        self._last_read_at = self._loop.time()
        self._quiet = False  # of a silence before the reader took something; nothing may stand behind the last line
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
                self._quiet, comment, self._comment = False, self._comment, self._usual
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
            self._ready, self._quiet, self._comment = chunk, False, self._usual  # what it waited for has come
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
            self._comment = f": waits for: {text}\n\n".encode() if text else self._usual
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
    heartbeat: ClassVar[bytes] = HEARTBEAT
    """Bytes that are sent after some silence; clients ignore them."""

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
        feed = Feed(self._chunks, stop, self._heartbeat, self._waits, self.heartbeat)
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
