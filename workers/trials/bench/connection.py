"""An HTTP/1.1 client that does little work for each token, so that a bench does not measure its own client.

It understands what gateways send: bodies with a length, chunked bodies, and bodies that end with the connection.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from workers.gateway_http import Event, EventStream, authorization

#: Idle time (s) after which a connection is not reused: the server may be closing it.
IDLE_S: Final = 2.0


class Broken(Exception):
    """The connection failed, or the answer is not HTTP."""


@dataclass(slots=True)
class Answer:
    """A response; `body` may be read once."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader
    ended: bool = False
    """Whether the body was read and has a known end: the connection can be used again."""

    async def body(self) -> AsyncIterator[bytes]:
        """The body's pieces as they come. Raises Broken."""
        reader = self._reader
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int((await reader.readline()).partition(b";")[0], 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
            self.ended = True
        elif "content-length" in self.headers:
            remaining = int(self.headers["content-length"])
            while remaining:
                piece = await reader.read(remaining)
                if not piece:
                    raise Broken("the connection ended within an answer")
                remaining -= len(piece)
                yield piece
            self.ended = True
        elif self.status != 204:
            while piece := await reader.read(1 << 16):
                yield piece

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.body()])

    async def json(self) -> Any:
        return json.loads(await self.whole())

    async def events(self) -> AsyncIterator[list[Event]]:
        """Server-sent events in batches as they came; of a comment an empty one. Raises Broken."""
        stream = EventStream()
        async for piece in self.body():
            yield stream.feed(piece)


@dataclass(slots=True)
class Connections:
    """A pool of connections to one server. Each serves one request at a time. `headers`: of every request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=authorization)
    _idle: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=list)

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[Answer]:
        """Send a request. Yields the answer with its head; read the body within. Raises Broken."""
        parts = urlsplit(self.url)
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in {**self.headers, **(headers or {})}.items())
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        writer = None
        try:
            reader, writer = await self._open()
            writer.write(f"{head}\r\n".encode() + content)
            answer = await _head(reader)
            yield answer
            if answer.ended and answer.headers.get("connection", "") != "close":
                self._idle.append((time.monotonic(), reader, writer))
                writer = None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise Broken(str(error) or type(error).__name__) from error
        finally:
            if writer is not None:
                writer.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[2].close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < IDLE_S and not reader.at_eof():
                return reader, writer
            writer.close()
        parts = urlsplit(self.url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        return await asyncio.open_connection(parts.hostname, port, ssl=tls)


async def _head(reader: asyncio.StreamReader) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, status_line = lines[0].partition(" ")
    if not version.startswith("HTTP/1."):
        raise Broken(f"the server does not speak HTTP: {lines[0][:40]!r}")
    status = int(status_line[:3])
    headers = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(status, headers, reader)
