"""Limits answers of tens of megabytes: few are in memory at once, and slow readers are cut off.

collected up to LARGE -> acquire a permit -> the rest -> sent in chunks, as fast as the reader takes them -> release
a permit -> a piece at a time is read from the store, and sent -> release
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.client.steps import FAILURES
from producers.connection.turns import OWNER, Busy
from producers.errors import PenstockError
from producers.gateway import fair_share
from producers.gateway.context import Gateway
from producers.gateway.http.connection import cut
from producers.gateway.http.errors import unavailable
from producers.gateway.http.request_body import BodyRoom

logger = logging.getLogger(__name__)

#: Size (bytes) beyond which an answer needs a permit.
LARGE: Final = 1 << 20
#: Bytes handed to the server at a time.
CHUNK: Final = 1 << 16
#: Least average speed (bytes a second) of a large answer's reader; slower ones are cut off, since others wait.
SLOWEST: Final = 1 << 17


async def turn(gateway: Gateway, patience: float, hint: str = "try again in a moment") -> Callable[[], None]:
    """Acquire a permit for a large answer within `patience` seconds. Returns its release, to be called once.

    Raises Problem, with the hint.
    """
    owner = OWNER.get()
    try:
        if not gateway.large.take(owner):
            await gateway.large.wait(owner, patience)
    except Busy:
        message = f"As many large results as this gateway keeps in memory are being read; {hint}."
        raise unavailable(message, code="too_many_large_results") from None
    return partial(gateway.large.give, owner)


class Sent(Response):
    """Sends JSON that is given in pieces. `release` is called at the end.

    A reader that takes nothing for `stall` seconds is cut off, as is a too slow reader of a large answer. `room`:
    counts what is more than a chunk, by its owner; sending raises Problem where there is none.
    """

    media_type = "application/json"

    def __init__(
        self,
        pieces: Iterable[bytes | bytearray],
        stall: float,
        release: Callable[[], None] | None = None,
        room: BodyRoom | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = list(pieces)
        self._stall = stall
        self._release = release
        self._size = sum(map(len, self._pieces))
        self._room = room if self._size > CHUNK else None
        self.init_headers({"content-length": str(self._size)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner, held_bytes = OWNER.get(), 0
        try:
            if self._room is not None:
                self._room.take(owner, self._size)
                held_bytes = self._size
            async with asyncio.timeout(None if self._release is None else self._stall + self._size / SLOWEST):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                for chunk in self._chunks():
                    await fair_share.turn()
                    async with asyncio.timeout(self._stall):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("cut off a reader that was too slow for a result of %d bytes", self._size)
            cut(scope)
        finally:
            if self._room is not None and held_bytes:
                self._room.give(owner, held_bytes)
            if self._release is not None:
                self._release()

    def _chunks(self) -> Iterator[bytes]:
        """The pieces in chunks of CHUNK bytes. Each piece is freed once it has been copied."""
        buffer = bytearray()
        for at, piece in enumerate(self._pieces):
            self._pieces[at] = b""
            for start in range(0, len(piece), CHUNK):
                buffer += piece[start : start + CHUNK]
                if len(buffer) >= CHUNK:
                    yield bytes(buffer)
                    buffer.clear()
        yield bytes(buffer)


class Streamed(Response):
    """Sends JSON whose pieces are read from the store while it is sent. `release` is called at the end.

    A slow reader is cut off as one of a large `Sent`; so is every reader if a piece cannot be read any more.
    """

    media_type = "application/json"

    def __init__(self, pieces: AsyncGenerator[bytes], stall: float, release: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._stall = stall
        self._release = release
        self.init_headers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent, spent = 0, 0.0
        try:
            async with aclosing(self._pieces) as pieces:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for piece in pieces:
                    for start in range(0, len(piece), CHUNK):
                        await fair_share.turn()
                        begun = time.monotonic()
                        async with asyncio.timeout(min(self._stall, self._stall + sent / SLOWEST - spent)):
                            chunk = piece[start : start + CHUNK]
                            await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        sent, spent = sent + len(chunk), spent + time.monotonic() - begun
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("cut off a reader that was too slow for a result, after %d bytes", sent)
            cut(scope)
        except (PenstockError, *FAILURES) as error:
            logger.warning("cut off a reader after %d bytes of a result that cannot be read on: %s", sent, error)
            cut(scope)
        finally:
            self._release()
