"""`/livez` and `/readyz` of a process other than a gateway, for whoever runs it. Only where a port was given.

/livez   200 while it works or ends in order; 503 once a worker has given itself up (it ends by itself, soon after), or
         the event loop of another process has run nothing for STUCK_S
/readyz  200 while it takes tasks; 503 with the reasons where it does not: draining, no lease, a stuck part, a fault;
         with the phases of a worker's start

Both are answered by threads. So a process whose event loop is stuck still answers, and `EventLoop` finds that out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from workers.errors import Refused
from workers.runtime.cold_start import COLD_START

logger = logging.getLogger(__name__)

HOST: Final = "0.0.0.0"  # noqa: S104 - whoever runs the process asks from outside
#: Most connections at a time. Each has a thread and a file, of which the process's own work needs some.
AT_ONCE: Final = 16
#: Longest time (s) for which one may say nothing.
PATIENCE_S: Final = 5.0

#: Time (s) without any callback after which an event loop is stuck. All work on it comes in shorter pieces.
STUCK_S: Final = 30.0


class Watched(Protocol):
    """A process whose health is asked for."""

    @property
    def given_up(self) -> str:
        """The reason why it has given itself up; empty if it has not."""

    def unready(self) -> list[str]:
        """Returns the reasons why it takes no work now; empty if it does."""


class EventLoop:
    """Checks that an event loop runs. Each look posts a callback, and the next one sees whether it has run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_at: float | None = None
        """When (monotonic) the callback was posted that has not run yet."""

    def waits(self) -> float:
        """Seconds for which the loop has not answered; 0 if it has. A loop that is closed ended in order."""
        asked_at = self._asked_at
        if asked_at is None:
            self._asked_at = time.monotonic()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._answer)
            return 0.0
        return 0.0 if self._loop.is_closed() else time.monotonic() - asked_at

    def _answer(self) -> None:
        self._asked_at = None


class _Server(ThreadingHTTPServer):
    """Has AT_ONCE connections at a time; a further one ends the oldest, whose request came in too slowly."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= AT_ONCE:
                self._end(next(iter(self._open)))
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Say nothing: the client has left, or was ended."""

    def _end(self, oldest: socket.socket) -> None:
        del self._open[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends


class Health:
    """Answers the probes, also while the process starts. Call `serve` once there is a runtime to look at."""

    def __init__(self, port: int | None, starting: str = "it starts") -> None:
        """Listens on this port; 0: any free one; None: not at all. Raises Refused if the port cannot be had.

        `starting`: the reason for which it is not ready until `serve`.
        """
        self._runtime: Watched | None = None
        self._loop: EventLoop | None = None
        self._starting = starting
        self.port = None if port is None else self._listen(port)

    def _listen(self, port: int) -> int:
        health = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE_S

            def do_GET(self) -> None:
                status, body = health.answer(self.path.partition("?")[0])
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Log nothing: a probe comes every few seconds."""

        try:
            server = _Server((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise Refused(f"cannot listen on {HOST} port {port} for /readyz: {error}") from error
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        return int(server.server_address[1])

    def serve(self, runtime: Watched, loop: asyncio.AbstractEventLoop | None) -> None:
        """Looks at this runtime from now on. `loop`: its event loop, which is looked at, too; None: another part of the
        runtime does that."""
        self._runtime = runtime
        self._loop = None if loop is None else EventLoop(loop)
        if self.port is not None:
            logger.info("/livez and /readyz on port %d", self.port)

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        runtime = self._runtime
        if path == "/livez":
            failed = ("" if runtime is None else runtime.given_up) or self._stuck()
            return (503, {"status": "failed", "reasons": [failed]}) if failed else (200, {"status": "ok"})
        if path == "/readyz":
            reasons = [self._starting] if runtime is None else runtime.unready()
            body: dict[str, Any] = {"status": "not ready", "reasons": reasons} if reasons else {"status": "ready"}
            if "total" in (start := COLD_START.figures):  # a worker that has been ready
                body["cold_start"] = start
            return (503 if reasons else 200), body
        return 404, {"status": "there are /livez and /readyz"}

    def _stuck(self) -> str:
        waits = 0.0 if self._loop is None else self._loop.waits()
        return f"its event loop has run nothing for {waits:.0f} s" if waits > STUCK_S else ""
