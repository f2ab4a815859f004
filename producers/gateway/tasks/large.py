"""Answers of tens of megabytes: few are in memory at once, and none waits for its reader for ever.

collected up to LARGE -> a turn -> the rest -> sent in chunks, no faster than they are taken -> the turn is over
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from producers.gateway.context import Gateway
from producers.gateway.http.connection import cut
from producers.gateway.http.errors import RETRY_AFTER, Problem

logger = logging.getLogger(__name__)

#: An answer beyond this (bytes) is one of few that are in memory at once.
LARGE: Final = 1 << 20
#: Bytes handed to the server at a time.
CHUNK: Final = 1 << 16
#: Bytes a second: a reader that takes less than that of a large answer, on the whole, is cut off. Others wait for it.
SLOWEST: Final = 1 << 17


async def turn(gateway: Gateway, patience: float, hint: str = "try again in a moment") -> Callable[[], None]:
    """Wait for a turn, for `patience` seconds at most; what it gives ends the turn. Raises Problem with the hint."""
    try:
        async with asyncio.timeout(patience):
            await gateway.large.acquire()
    except TimeoutError:
        raise Problem(
            503,
            f"As many large results as this gateway keeps in memory are being read; {hint}.",
            code="too_many_large_results",
            headers=RETRY_AFTER,
        ) from None
    return gateway.large.release


class Sent(Response):
    """Sends JSON that was made in pieces. `release` is called when all is over.

    A reader that takes nothing for `stall` seconds is cut off, and so is one of a large answer that is too slow.
    """

    media_type = "application/json"

    def __init__(
        self, pieces: Iterable[bytes | bytearray], stall: float, release: Callable[[], None] | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = list(pieces)
        self._stall = stall
        self._release = release
        self._size = sum(map(len, self._pieces))
        self.init_headers({"content-length": str(self._size)})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(None if self._release is None else self._stall + self._size / SLOWEST):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                for chunk in self._chunks():
                    async with asyncio.timeout(self._stall):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            logger.info("cut off a reader that was too slow for a result of %d bytes", self._size)
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
