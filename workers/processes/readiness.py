"""Hears from a child process that it serves, as sd_notify(3) has it: READY=1 on the socket named by NOTIFY_SOCKET."""

from __future__ import annotations

import asyncio
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Readiness:
    """The socket of one child. `heard` is called for each process of it that serves, on this event loop."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.address = self._bind()
        """The value of NOTIFY_SOCKET."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _bind(self) -> str:
        if sys.platform == "linux":  # an abstract name, which the kernel chooses and drops with this process
            self._socket.bind("")
            return "@" + str(self._socket.getsockname()[1:].decode())
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-")
        path = str(Path(self._folder.name) / "notify")
        self._socket.bind(path)
        return path

    def _read(self) -> None:
        with suppress(BlockingIOError):
            if b"READY=1" in self._socket.recv(4096).split(b"\n"):
                self._heard()
