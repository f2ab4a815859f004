"""Ports that a process listens on."""

from __future__ import annotations

import socket
from errno import EACCES, EADDRINUSE

from workers.cli.exits import Failure


def open_port(host: str, port: int, *, listens: bool = True) -> socket.socket:
    """A listening socket. Port 0 takes any free port. Raises Failure if the address cannot be bound.

    `listens`: callers wait from now on. Otherwise they are refused until a server takes it, so that a proxy asks
    another gateway, and no caller who comes back waits for a start.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        if listens:
            listener.listen(2048)
        return listener
    except OSError as error:
        listener.close()
        other = "port with --port (0: any free)" if error.errno in (EADDRINUSE, EACCES) else "address with --host"
        raise Failure(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another {other}"
        ) from error
