"""A final task as JSON, put together piece by piece.

    stream, a page at a time -> each token's JSON, by choice -> sent in chunks, no faster than they are taken

What a task may give is tens of megabytes as JSON, and many times that as objects; nor may making it stop the loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from json.encoder import encode_basestring as quote
from typing import Any, Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.aio import AsyncHandle
from producers.events import Event, Prompt, Token
from producers.gateway.connection import cut
from producers.gateway.context import Gateway
from producers.gateway.errors import RETRY_AFTER, Problem
from producers.gateway.sse import logprobs_view, prompt_view
from producers.gateway.views import TaskView
from producers.record import Record

logger = logging.getLogger(__name__)

#: An answer beyond this (bytes) is one of few that are in memory at once.
LARGE: Final = 1 << 20
#: Bytes handed to the server at a time.
CHUNK: Final = 1 << 16


async def answer(gateway: Gateway, handle: AsyncHandle, record: Record) -> Response:
    """The response for a final record. Raises TaskNotFound, Problem, redis.exceptions.RedisError or OSError."""
    outcome = Outcome(record)
    release: Callable[[], None] | None = None
    try:
        async with aclosing(handle.batches()) as batches:
            async for events in batches:
                if any(not isinstance(event, Token) or event.logprobs for event in events):
                    await asyncio.to_thread(outcome.take, events)
                else:
                    outcome.take(events)
                if release is None and outcome.size > LARGE:
                    release = await _turn(gateway)
    except BaseException:
        if release is not None:
            release()
        raise
    return _Sent(outcome, gateway.settings.stall, release)


async def _turn(gateway: Gateway) -> Callable[[], None]:
    try:
        async with asyncio.timeout(gateway.settings.patience):
            await gateway.large.acquire()
    except TimeoutError:
        raise Problem(
            503,
            "As many large results as this gateway keeps in memory are being read; try again in a moment.",
            code="too_many_large_results",
            headers=RETRY_AFTER,
        ) from None
    return gateway.large.release


class Outcome:
    """`take` all events, then `pieces`."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._choices = [_Choice() for _ in range(record.n)]
        self._prompt = bytearray()

    @property
    def size(self) -> int:
        """Bytes of log probabilities: what makes an outcome large."""
        return len(self._prompt) + sum(len(choice.logprobs) for choice in self._choices)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self._choices[event.choice].take(event)
            elif isinstance(event, Prompt):
                for one in prompt_view(event.token_ids, event.logprobs):
                    self._prompt += b"," if self._prompt else b""
                    self._prompt += _json(one)

    def pieces(self) -> Iterator[bytes | bytearray]:
        """The JSON of a TaskView."""
        head = TaskView.of(self._record).model_dump_json(exclude={"choices", "prompt_logprobs"})
        yield head[:-1].encode() + b',"choices":['
        reasons = self._record.json("reasons") or []
        for index, choice in enumerate(self._choices):
            reason = reasons[index] if index < len(reasons) else None
            yield b"," if index else b""
            yield from choice.pieces(index, reason)
        yield b'],"prompt_logprobs":'
        if self._prompt:
            yield b"["
            yield self._prompt
            yield b"]}"
        else:
            yield b"null}"


class _Choice:
    __slots__ = ("_ids", "_scored", "_texts", "logprobs")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._scored = False
        self.logprobs = bytearray()

    def take(self, token: Token) -> None:
        self._texts.append(token.text)
        self._ids.append(token.token_id)
        if token.logprobs is None:
            if self._scored:
                self.logprobs += b",null"
            return
        if not self._scored:
            self._scored = True
            self.logprobs += b"null," * (len(self._ids) - 1)
        else:
            self.logprobs += b","
        self.logprobs += _json(logprobs_view(token.logprobs))

    def pieces(self, index: int, reason: str | None) -> Iterator[bytes | bytearray]:
        text, ids = quote("".join(self._texts)), ",".join(map(str, self._ids))
        shown = "null" if reason is None else quote(reason)
        yield f'{{"index":{index},"text":{text},"token_ids":[{ids}],"finish_reason":{shown},"logprobs":'.encode()
        if self._scored:
            yield b"["
            yield self.logprobs
            yield b"]}"
        else:
            yield b"null}"


class _Sent(Response):
    """Sends an outcome. A reader that takes nothing is cut off; `release` is called when all is over."""

    media_type = "application/json"

    def __init__(self, outcome: Outcome, stall: float, release: Callable[[], None] | None) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = list(outcome.pieces())
        self._stall = stall
        self._release = release
        self.init_headers({"content-length": str(sum(map(len, self._pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for chunk in self._chunks():
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("cut off a reader that took nothing of a result for %s s", self._stall)
            cut(scope)
        finally:
            if self._release is not None:
                self._release()

    def _chunks(self) -> Iterator[bytes]:
        """The pieces in chunks of even size; each piece is let go when it was given."""
        buffer = bytearray()
        for at, piece in enumerate(self._pieces):
            self._pieces[at] = b""
            for start in range(0, len(piece), CHUNK):
                buffer += piece[start : start + CHUNK]
                if len(buffer) >= CHUNK:
                    yield bytes(buffer)
                    buffer.clear()
        yield bytes(buffer)


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
