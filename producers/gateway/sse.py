"""A task's stream as server-sent events (WHATWG HTML, 9.2).

    id: 7
    event: token
    data: {"position":7,"choice":0,"index":7,"token_id":318,"text":" is"}

`id` is the position, which a client sends back as `Last-Event-ID` to go on behind it. After the event `end` nothing
follows; a stream that closes without it is to be taken up again. `error` says why it closes. JSON is in ASCII, because
many clients split lines at U+2028 and the like, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.errors import PenstockError
from producers.events import Event, Logprobs, Token
from producers.gateway.errors import body_of, problem_of
from producers.steps import FAILURES

logger = logging.getLogger(__name__)

#: The first line: how soon (ms) an EventSource comes back when the connection breaks.
PREAMBLE = b"retry: 1000\n\n"
HEARTBEAT = b": still here\n\n"


def logprobs_view(logprobs: Logprobs) -> dict[str, Any]:
    """A token's log probability and the alternatives', as callers see them."""
    logprob, top = logprobs
    return {"logprob": logprob, "top": [{"token_id": token, "logprob": value} for token, value in top]}


def encode(event: Event) -> str:
    """An event's lines. A token's are made by hand: this runs for every token of every reader."""
    if isinstance(event, Token):
        more = "" if event.logprobs is None else f',"logprobs":{json.dumps(logprobs_view(event.logprobs))}'
        if event.finish_reason is not None:
            more += f',"finish_reason":{quote(event.finish_reason)}'
        return (
            f'id: {event.position}\nevent: token\ndata: {{"position":{event.position},"choice":{event.choice},'
            f'"index":{event.index},"token_id":{event.token_id},"text":{quote(event.text)}{more}}}\n\n'
        )
    end = {
        "position": event.position,
        "status": event.status,
        "finish_reasons": event.reasons,
        "usage": event.usage,
        "error": event.error,
    }
    return f"id: {event.position}\nevent: end\ndata: {json.dumps(end)}\n\n"


class Streams:
    """The streams that are open, so that they can be counted, and ended when the gateway stops."""

    def __init__(self) -> None:
        self._open: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    def end(self) -> None:
        """Close all; their clients may take them up again elsewhere."""
        for stop in self._open:
            if not stop.done():
                stop.set_result(None)

    def enter(self) -> asyncio.Future[None]:
        stop = asyncio.get_running_loop().create_future()
        self._open.add(stop)
        return stop

    def leave(self, stop: asyncio.Future[None]) -> None:
        self._open.discard(stop)


class EventStream(Response):
    """Sends batches of events as they come, until they end, the client leaves, or the gateway stops.

    A slow client is waited for with nothing in hand but one batch: meanwhile `batches` is not asked. `first`: a batch
    that was taken before, to see what there is.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        batches: AsyncGenerator[list[Event]],
        streams: Streams,
        *,
        first: Sequence[Event] = (),
        heartbeat: float,
        stall: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._batches = batches
        self._streams = streams
        self._first = first
        self._heartbeat = heartbeat
        self._stall = stall
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stop = self._streams.enter()
        leaving = asyncio.create_task(_watch(receive, stop))
        try:
            async with aclosing(self._batches), aclosing(self._chunks(stop)) as chunks:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in chunks:
                    async with asyncio.timeout(self._stall):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("dropped a stream whose reader took nothing for %s s", self._stall)
        finally:
            self._streams.leave(stop)
            leaving.cancel()

    async def _chunks(self, stop: asyncio.Future[None]) -> AsyncGenerator[bytes]:
        yield PREAMBLE + _lines(self._first)
        coming: asyncio.Future[list[Event] | None] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(anext(self._batches, None))
                while not (await asyncio.wait((coming, stop), timeout=self._heartbeat, return_when="FIRST_COMPLETED"))[
                    0
                ]:
                    yield HEARTBEAT
                if not coming.done():
                    return
                events = coming.result()
                if events is None:
                    return
                yield _lines(events)
        except (PenstockError, *FAILURES) as error:
            yield f"event: error\ndata: {json.dumps(body_of(problem_of(error)))}\n\n".encode()
        finally:
            if coming is not None and coming.cancel():
                await asyncio.wait((coming,))


def _lines(events: Sequence[Event]) -> bytes:
    return "".join(map(encode, events)).encode("ascii")


async def _watch(receive: Receive, stop: asyncio.Future[None]) -> None:
    """Ends the stream when its client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    if not stop.done():
        stop.set_result(None)
