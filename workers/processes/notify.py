"""Telling whoever started this process how it is, as sd_notify(3) does."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Final

#: The field that names a lease (an incarnation). systemd ignores fields that begin with X_.
LEASE: Final = "X_PENSTOCK_LEASE"


def notify_ready(status: str = "") -> None:
    """Tell that this process serves. `status`: a line for people: `systemctl status` and `penstock up` show it."""
    _send(f"STATUS={status}\nREADY=1")


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
