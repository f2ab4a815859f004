"""Notifications of a process to the one that started it (sd_notify(3)), on the socket named by NOTIFY_SOCKET.

READY=1                      it serves
STATUS=TEXT                  a description of its start, for people: with READY=1 of the whole, before it what it is at
X_PENSTOCK_LEASE=NAME        it is about to take this lease

`notify_ready`, `notify_start` and `notify_lease` send them; `Readiness` receives those of a child process.
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

#: The field that names a lease (an incarnation). systemd ignores fields that begin with X_.
LEASE: Final = "X_PENSTOCK_LEASE"
#: The sender's process, user and group (unix(7), SCM_CREDENTIALS). The kernel vouches for them.
SENDER: Final = struct.Struct("3i")
#: Most messages that are read in one go: other users of the machine, to whom nobody listens, may send without end.
AT_ONCE: Final = 1024


def notify_ready(status: str = "") -> None:
    """Tell that this process serves. `status`: a line for people: `systemctl status` and `penstock up` show it."""
    _send(f"STATUS={status}\nREADY=1")


def notify_start(status: str) -> None:
    """Tell what this process, which does not serve yet, is at."""
    _send(f"STATUS={status}")


def notify_lease(incarnation: str) -> None:
    """Tell that this process is about to take a lease, which nobody needs any more once the process has ended."""
    _send(f"{LEASE}={incarnation}")


def _send(lines: str) -> None:
    """Send them to NOTIFY_SOCKET, if there is one: systemd's (Type=notify), or that of the process that keeps this."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # Linux's abstract names begin with a zero byte, which no environment can hold.
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ours:
        ours.sendto(lines.encode(), name)


class Readiness:
    """The socket of one child, on this event loop. `on_ready(status)` is called for each process of it that serves,
    `on_start(status)` when one says what it is at before.

    `leased(name, pid)` gets each lease, and the process that sent it; None if the system does not say: then the
    socket lies in a folder that only this user may enter.
    """

    def __init__(
        self,
        on_ready: Callable[[str], None],
        leased: Callable[[str, int | None], None],
        on_start: Callable[[str], None] = lambda status: None,
    ) -> None:
        self._on_ready = on_ready
        self._on_start = on_start
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
        """Take the messages of this user, or root: an abstract name is everybody's on this machine."""
        with suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                data, ancillary, *_ = self._socket.recvmsg(4096, socket.CMSG_SPACE(SENDER.size))
                sender, user = _sender(ancillary)
                if user in (None, 0, os.geteuid()):
                    self._take(data.decode(errors="replace"), sender)

    def _take(self, message: str, sender: int | None) -> None:
        pairs = [line.partition("=") for line in message.split("\n")]
        fields = {name: value for name, _, value in pairs}
        if fields.get("READY") == "1":
            self._on_ready(fields.get("STATUS", ""))
        elif "STATUS" in fields:
            self._on_start(fields["STATUS"])
        for name, _, value in pairs:
            if name == LEASE:
                self._leased(value, sender)


def _sender(ancillary: list[tuple[int, int, bytes]]) -> tuple[int | None, int | None]:
    """Returns the process that sent a message, and its user; None if the system does not tell."""
    for level, kind, data in ancillary:
        if sys.platform == "linux" and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            process, user, _ = SENDER.unpack(data)
            return process, user
    return None, None
