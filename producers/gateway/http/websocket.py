"""A uvicorn protocol for WebSockets, under the same limits as other connections.

    Connection (an upgrade request, checked) -> Socket: handshake, pings, frames -> the application

- It counts as one of the gateway's connections, and is cut off as they are.
- When the gateway stops, it goes on until the application ends it: its streams have the time of a drain.
- Its application may answer the handshake with an HTTP error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from producers.gateway.http.connection import CUT, cut_off

#: Largest message (bytes) of a client, whose messages say nothing here.
MAX_MESSAGE: Final = 4096
#: uvicorn tells of each handshake; requests are counted in `producers.gateway.metrics` instead.
_log: Final = logging.getLogger("uvicorn.websocket")
_log.setLevel(logging.WARNING)


class Socket(WebSocketsSansIOProtocol):
    """A WebSocket with the limits of `Connection`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _log
        self.lost: Callable[[], None] = lambda: None
        """Called when the connection is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost()

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
