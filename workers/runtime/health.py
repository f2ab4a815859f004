"""`/livez` and `/readyz` of a worker or a webhooks process, for whoever runs it. Only where a port was given.

/livez   200 while it works or ends in order; 503 once it has given itself up (it ends by itself, soon after)
/readyz  200 while it takes tasks; 503 with the reasons where it does not: draining, no lease, a stuck part, a fault;
         with the phases of a worker's start
"""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

from workers.errors import Refused
from workers.runtime.cold_start import COLD_START

logger = logging.getLogger(__name__)

HOST: Final = "0.0.0.0"  # noqa: S104 - whoever runs the process asks from outside


class Watched(Protocol):
    """What is asked how it does."""

    @property
    def given_up(self) -> str:
        """Why it has given itself up; empty while it has not."""

    def unready(self) -> list[str]:
        """Why it takes no work now; empty while it does."""


class Health:
    """Answers while the model is loaded, too. `serve` once there is a runtime to look at."""

    def __init__(self, port: int | None) -> None:
        """Listens on this port; 0: any free one; None: nobody asks. Raises Refused where it is not to be had."""
        self._runtime: Watched | None = None
        self.port = None if port is None else self._listen(port)

    def _listen(self, port: int) -> int:
        health = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5.0

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
            server = ThreadingHTTPServer((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise Refused(f"cannot listen on {HOST} port {port} for /readyz: {error}") from error
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        return int(server.server_address[1])

    def serve(self, runtime: Watched) -> None:
        self._runtime = runtime
        if self.port is not None:
            logger.info("/livez and /readyz on port %d", self.port)

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        runtime = self._runtime
        if path == "/livez":
            given_up = "" if runtime is None else runtime.given_up
            return (503, {"status": "failed", "reasons": [given_up]}) if given_up else (200, {"status": "ok"})
        if path == "/readyz":
            reasons = ["the model is being loaded"] if runtime is None else runtime.unready()
            body: dict[str, Any] = {"status": "not ready", "reasons": reasons} if reasons else {"status": "ready"}
            if "total" in (start := COLD_START.figures):  # a worker that has been ready
                body["cold_start"] = start
            return (503 if reasons else 200), body
        return 404, {"status": "there are /livez and /readyz"}
