"""A TCP proxy in front of a server that loses requests or replies on demand."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit


@dataclass
class Fault:
    """The next `times` requests that contain `pattern` break their connection: `before` the server sees the request, or
    `after` it answered. `hits` counts them."""

    pattern: bytes
    when: Literal["before", "after"]
    times: int
    hits: int = 0


class Proxy:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}{parts.path}"
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self, pattern: bytes, when: Literal["before", "after"], times: int = 1) -> Fault:
        fault = Fault(pattern, when, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def cut(self) -> None:
        """Break all connections."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError):  # it was cut before, or left, which its thread has yet to see
                    connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(self._server) as far:
            with self._lock:
                self._open.add(near)
            try:
                self._relay(near, far)
            except OSError:
                pass
            finally:
                with self._lock:
                    self._open.discard(near)

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        while True:
            for ready in select.select([near, far], [], [])[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                if ready is far:
                    near.sendall(data)
                    continue
                fault = self._due(data)
                if fault is not None and fault.when == "before":
                    return
                far.sendall(data)
                if fault is not None:
                    far.recv(1 << 16)
                    return

    def _due(self, data: bytes) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.pattern in data and fault.hits < fault.times:
                    fault.hits += 1
                    return fault
        return None
