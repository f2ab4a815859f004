"""Runs the application on a socket, and stops it without cutting anyone off who can be finished."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
from types import FrameType
from typing import Final

import uvicorn
from fastapi import FastAPI

from producers.gateway.app import create_app
from producers.gateway.http.connection import limited
from producers.gateway.http.sse import Streams
from producers.gateway.settings import GatewaySettings

#: Open files that are no caller's connection: to store and broker, and whatever else there is.
OTHER_FILES: Final = 128


class _Server(uvicorn.Server):
    """The first signal stops listening and lets open streams go on for `drain` seconds; the second ends them."""

    def __init__(self, config: uvicorn.Config, streams: Streams, drain: float) -> None:
        super().__init__(config)
        self._streams = streams
        self._drain = drain
        self._loop: asyncio.AbstractEventLoop | None = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(self._drain, self._streams.end)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._streams.end)
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free. Raises OSError where that is not to be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def serve(settings: GatewaySettings, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT. The socket is closed then. Raises what `create_app` does."""
    app = create_app(settings)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # inherited by its connections: the kernel gives up whom we have given up
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(settings.stall * 1000))
    config = configured(app, settings)
    server = _Server(config, app.state.streams, settings.drain)
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, _stopped)  # uvicorn raises a signal again when it is done; that would be our exit status
    # What is there now stays: no collection need go through it again.
    gc.collect()
    gc.freeze()
    gc.collect()  # the next full one comes when a quarter of what this one leaves, nothing, has come
    server.run([listener])


def configured(app: FastAPI, settings: GatewaySettings) -> uvicorn.Config:
    """How the application is served."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=limited(
            settings.receive, max(1, min(settings.connections, files - OTHER_FILES)), app.state.metrics.refused
        ),
        ws="none",
        lifespan="on",
        log_config=None,  # what Python's logging is set to holds for all of the process
        access_log=False,
        server_header=False,
        # Longer than common load balancers keep theirs, so that it is never us who close a connection just being used.
        timeout_keep_alive=75,
        # Streams are ended before that; this is for whatever else would not come to an end.
        timeout_graceful_shutdown=round(settings.drain) + 5,
    )


def _stopped(sig: int, frame: FrameType | None) -> None:
    """The server has stopped as it was told to."""
