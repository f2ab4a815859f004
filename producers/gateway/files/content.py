"""Sends a file's bytes, whole or one range (RFC 9110, 14), piece by piece."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote

from fastapi import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from producers.connection.log_throttle import warn_throttled
from producers.connection.turns import Busy, Turns
from producers.errors import shown
from producers.gateway.fair_share import turn
from producers.gateway.http.connection import cut
from producers.gateway.http.errors import Problem, unavailable
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.files import File

logger = logging.getLogger(__name__)

#: Bytes that are read at a time: what a download holds in memory, beside the server's buffer.
PIECE: Final = 1 << 18
#: Time (s) for which a URL opens a file: the download has to begin within it.
URL_S: Final = 900
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class FileContent(Response):
    """Bytes `start` to `end` (exclusive) of a file.

    `first`: the first piece of them. A reader that takes nothing for `stall` seconds is cut off. So is one whose file
    is deleted meanwhile: the length that it was told no longer holds.
    """

    media_type = "application/octet-stream"

    def __init__(
        self, blobs: Blobs, pieces: Turns, file: File, start: int, end: int, first: bytes, stall: float
    ) -> None:
        self.status_code = 200 if (start, end) == (0, file.size) else 206
        self.background = None
        self._blobs, self._pieces, self._name = blobs, pieces, file.id
        self._at, self._end = start + len(first), end
        self._first = first
        self._stall = stall
        headers = {
            "content-length": str(end - start),
            "accept-ranges": "bytes",
            "etag": f'"{file.id}"',
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, errors='replace')}",
        }
        if self.status_code == 206:
            headers["content-range"] = f"bytes {start}-{end - 1}/{file.size}"
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        piece = self._first
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while piece:
                await turn()
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                size = min(PIECE, self._end - self._at)
                async with self._pieces.turn(self._stall):
                    piece = await asyncio.to_thread(self._blobs.read, self._name, self._at, size)
                self._at += len(piece)
            if self._at < self._end:
                raise BlobNotFound(f"{self._name} ends at {self._at} bytes")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, Busy, BlobNotFound, OSError) as error:
            logger.info("cut off a reader of %s: %s", self._name, str(error) or f"took nothing for {self._stall} s")
            cut(scope)


async def content_of(request: Request, blobs: Blobs, pieces: Turns, file: File, stall: float) -> FileContent:
    """The answer to a request for a file's content. `pieces`: permits to read one. Raises Problem, and OSError."""
    start, end = _asked(request, file)
    with _known(file):
        async with pieces.turn(stall):
            first = await asyncio.to_thread(blobs.read, file.id, start, min(PIECE, end - start))
    return FileContent(blobs, pieces, file, start, end, first, stall)


async def redirect_of(blobs: Blobs, file: File) -> Response:
    """An answer that sends the caller to the bucket. Raises Problem, and OSError."""
    with _known(file):
        await asyncio.to_thread(blobs.size, file.id)
    url = await asyncio.to_thread(blobs.url, file.id, file.filename, URL_S)
    assert url is not None, "the settings are refused where there are no URLs"
    return RedirectResponse(url, 307)


@contextmanager
def _known(file: File) -> Iterator[None]:
    try:
        yield
    except BlobNotFound:
        warn_throttled(logger, "a file is known, and not in this gateway's --files-dir: %s", file.id)
        message = (
            f"The content of {file.id} is not in this gateway's --files-dir, which all gateways and sweepers share."
        )
        raise unavailable(message, code="file_unavailable") from None


def _asked(request: Request, file: File) -> tuple[int, int]:
    """Begin and end (exclusive) of the range that is asked for. Several ranges are answered by the whole file."""
    header = request.headers.get("range")
    match = None if header is None else _RANGE.fullmatch(header.strip())
    if (
        match is None
        or match.group(0) == "bytes=-"
        or request.headers.get("if-range", f'"{file.id}"') != f'"{file.id}"'
    ):
        return 0, file.size
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1 if last else file.size, file.size)
    else:
        start, end = max(0, file.size - int(last)), file.size
    if start >= end:
        raise Problem(
            416,
            f"Range is {shown(header)}; the file has {file.size} bytes.",
            code="invalid_range",
            param="Range",
            headers={"content-range": f"bytes */{file.size}"},
        )
    return start, end
