"""Hears from a child process, as sd_notify(3) has it, on the socket named by NOTIFY_SOCKET.

READY=1                      it serves
STATUS=WORDS                 before READY=1: what it says of its start, for people
X_PENSTOCK_LEASE=NAME        it is about to take this lease
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from workers.processes.notify import LEASE

#: The sender's process, user and group (unix(7), SCM_CREDENTIALS). The kernel vouches for them.
SENDER: Final = struct.Struct("3i")
#: Most messages that are read in one go: other users of the machine, to whom nobody listens, may send without end.
AT_ONCE: Final = 1024


class Readiness:
    """The socket of one child, on this event loop. `heard(status)` is called for each process of it that serves.

    `leased(name, pid)` gets each lease, and the process that told it; None where the system does not say: there the
    socket lies in a folder that only this user may enter.
    """

    def __init__(self, heard: Callable[[str], None], leased: Callable[[str, int | None], None]) -> None:
        self._heard = heard
        self._leased = leased
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        if sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.address = self._bind()
        """The value of NOTIFY_SOCKET."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self.read)

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

    def read(self) -> None:
        """Take what has come from this user, or root: an abstract name is everybody's on this machine."""
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                data, aside, *_ = self._socket.recvmsg(4096, socket.CMSG_SPACE(SENDER.size))
                sender, user = _sender(aside)
                if user in (None, 0, os.geteuid()):
                    self._take(data.decode(errors="replace"), sender)

    def _take(self, message: str, sender: int | None) -> None:
        status = ""
        for line in message.split("\n"):
            name, _, value = line.partition("=")
            if name == "STATUS":
                status = value
            elif line == "READY=1":
                self._heard(status)
            elif name == LEASE:
                self._leased(value, sender)


def _sender(aside: list[tuple[int, int, bytes]]) -> tuple[int | None, int | None]:
    """The process that sent it, and its user; None where the system does not say."""
    for level, kind, data in aside:
        if sys.platform == "linux" and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            process, user, _ = SENDER.unpack(data)
            return process, user
    return None, None
