"""A uvicorn protocol for WebSockets, under the same limits as other connections.

    Connection (an upgrade request, checked) -> Socket: handshake, pings, frames -> the application

- It counts as one of the gateway's connections, and is cut off as they are.
- When the gateway stops, it goes on until the application ends it: its streams have the time of a drain.
- Its application may answer the handshake with an HTTP error.
- A client has little to say here: it answers pings, may send some, and closes. One that says more is cut off: a frame
  of 6 bytes takes 20 µs, and a read of 256 KiB has 40,000.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from producers.gateway.http.connection import CUT, cut_off

#: Largest message (bytes) of a client, whose messages say nothing here.
MAX_MESSAGE: Final = 4096
#: Bytes and frames of a client that are taken at once, and further ones each second.
BYTES, BYTES_A_SECOND = 2 * MAX_MESSAGE, 256
FRAMES, FRAMES_A_SECOND = 64, 2
#: uvicorn tells of each handshake; requests are counted in `producers.gateway.metrics` instead.
_log: Final = logging.getLogger("uvicorn.websocket")
_log.setLevel(logging.WARNING)


class Allowance:
    """A token bucket: `burst` at once, and `rate` more each second."""

    __slots__ = ("_at", "_burst", "_rate", "_tokens")

    def __init__(self, burst: int, rate: int, now: float) -> None:
        self._tokens = float(burst)
        self._burst, self._rate, self._at = burst, rate, now

    def take(self, number: int, now: float) -> int:
        """Take so many at a time (s). Returns how many of them are allowed."""
        self._tokens = min(self._burst, self._tokens + self._rate * (now - self._at))
        self._at = now
        allowed = min(number, int(self._tokens))
        self._tokens -= allowed
        return allowed


class Socket(WebSocketsSansIOProtocol):
    """A WebSocket with the limits of `Connection`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _log
        now = self.loop.time()
        self._bytes, self._frames = Allowance(BYTES, BYTES_A_SECOND, now), Allowance(FRAMES, FRAMES_A_SECOND, now)
        self.lost: Callable[[], None] = lambda: None
        """Called when the connection is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost()

    def data_received(self, data: bytes) -> None:
        if not self.handshake_initiated:  # the handshake, which `Connection` has checked
            super().data_received(data)
            return
        if self.transport.is_closing():
            return
        allowed = self._bytes.take(len(data), self.loop.time())
        if allowed:
            super().data_received(data[:allowed])
        if allowed < len(data):
            self._cut()

    def handle_ping(self) -> None:
        if self._hears():
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        if self._hears():
            super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        if self._hears():
            super().handle_cont(event)

    def _hears(self) -> bool:
        """Whether one more frame is taken, which is no message of its own."""
        if self.transport.is_closing():
            return False
        if not self._frames.take(1, self.loop.time()):
            self._cut()
            return False
        return True

    def _cut(self) -> None:
        if not self.transport.is_closing():
            _log.info("cut off a WebSocket whose client says too much")
            cut_off(self.transport)

    def shutdown(self) -> None:
        """Wait for the application, which ends when the gateway's streams do."""

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = self.scope["extensions"]  # with ours
        extensions[CUT] = lambda: cut_off(self.transport)
        await super().run_asgi()

    async def send(self, message: ASGISendEvent) -> None:
        """An HTTP answer completes the handshake, too: uvicorn would log an error for each."""
        await super().send(message)
        self.handshake_complete |= self.close_sent
