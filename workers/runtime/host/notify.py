"""Telling whoever started this process that it serves, as sd_notify(3) does."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify_ready() -> None:
    """Send READY=1 to NOTIFY_SOCKET, if there is one: systemd's (Type=notify), or that of the process that keeps it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    # Linux's abstract names begin with a zero byte, which no environment can hold.
    name = "\0" + address[1:] if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as ours:
        ours.sendto(b"READY=1", name)
