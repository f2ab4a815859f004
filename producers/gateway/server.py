"""Serves the application on a socket, and drains it at the end."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final, cast

import uvicorn
from fastapi import FastAPI

from producers.gateway.app import create_app
from producers.gateway.http.connection import Connection, limited
from producers.gateway.http.peers import SHARE, Peers
from producers.gateway.http.sse import Streams
from producers.gateway.http.websocket import MAX_MESSAGE, Socket
from producers.gateway.settings import GatewaySettings

#: Bytes that the kernel keeps of an answer beside those that are under way. What a reader does not take stays in the
#: store, and costs nobody the work to read it: without this, the kernel took megabytes for each.
UNSENT: Final = 1 << 16

#: When Python looks for cycles among its objects: the newest ones once so many more were made than freed, and all of
#: them after so many times of that. With its own 700, 10 and 10 it looked at all objects of hundreds of open streams
#: every few seconds, and the loop stood still for 60 ms.
CYCLES: Final = (2_000, 10, 50)


class _Server(uvicorn.Server):
    """A uvicorn server. The first signal stops listening and lets open streams go on for `drain` seconds.

    The second signal ends them.
    """

    def __init__(
        self, config: uvicorn.Config, streams: Streams, drain: float, ready: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._streams = streams
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(self._drain, self._streams.end)
        cast("type[Connection]", self.config.http_protocol_class).stops = True
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._streams.end)
        super().handle_exit(sig, frame)


def serve(settings: GatewaySettings, listener: socket.socket, ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM or SIGINT. The socket is closed then. `ready`: called once it serves. Raises what
    `create_app` does."""
    app = create_app(settings)
    bound(listener, settings)
    config = configured(app, settings)
    server = _Server(config, app.state.streams, settings.drain, ready)
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, _stopped)  # uvicorn re-raises signals at its end, which would set the exit status
    build_routes(app)
    # Objects that exist now stay: freeze them, so that no collection scans them again.
    gc.collect()
    gc.freeze()
    gc.collect()  # the next full collection depends on the survivors of this one, of which there are none
    gc.set_threshold(*CYCLES)
    server.run([listener])


def bound(listener: socket.socket, settings: GatewaySettings) -> None:
    """Bound what the kernel holds for connections, which inherit it."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel drops stalled peers as we do
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.stall * 1000))
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)


def build_routes(app: FastAPI) -> None:
    """FastAPI builds its routes' checks when a router is first asked: let no caller wait for that (75 ms)."""
    nowhere = {"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []}
    for route in app.routes:
        route.matches(nowhere)


def configured(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """The settings with which uvicorn serves the application."""
    max_connections, share, figures = settings.most_connections, settings.connections_per_address, app.state.metrics
    peers = Peers(
        max_connections,
        max(1, max_connections // SHARE) if share is None else share,
        settings.proxy_headers,
        figures.closed_idle,
    )
    figures.connections(peers.__len__)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=limited(settings.receive, peers, app.state.fair_share, figures.refused),
        ws=Socket,
        ws_max_size=MAX_MESSAGE,
        ws_ping_interval=settings.heartbeat,
        ws_ping_timeout=settings.stall,
        ws_per_message_deflate=False,  # it would cost each connection memory, and each token time
        lifespan="on",
        log_config=None,  # Python's logging settings hold for the whole process
        access_log=False,
        server_header=False,
        # Not uvicorn's defaults, which believe every process of this machine, or an environment variable.
        proxy_headers=bool(settings.proxy_headers),
        forwarded_allow_ips=list(settings.proxy_headers),
        # Longer than common load balancers' own timeout, so that we never close a connection that one is about to use.
        timeout_keep_alive=75,
        # Streams end before that; this limits any other request that would not end.
        timeout_graceful_shutdown=round(settings.drain) + 5,
    )


def _stopped(sig: int, frame: FrameType | None) -> None:
    """Ignore a signal: the server has already stopped for it."""
