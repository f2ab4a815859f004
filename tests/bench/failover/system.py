"""Valkey, workers with the bundled model, and gateways, as processes of one's own."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from producers.broker.redis import keys as broker_keys
from tests.processes import ROOT, free_port, guarded, ranks_below, valkey
from workers.cli.client import Gateway
from workers.processes import PENSTOCK

#: Longest (s) that a process may take to come up or to stop.
PATIENCE_S = 120.0


class Process:
    """A `penstock` process, or a supervisor with one below it. Its output goes to a file; it dies with this one."""

    def __init__(self, folder: Path, name: str, url: str, *argv: str, supervised: bool = False) -> None:
        self.name, self._supervised = name, supervised
        above = (sys.executable, "-m", "tests.bench.failover.supervised") if supervised else ()
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                guarded(*above, *PENSTOCK, *argv),
                cwd=ROOT,
                env={**os.environ, "BROKER_URL": url, "STORE_URL": url},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def signal(self, sig: signal.Signals) -> None:
        """Send it to the `penstock` process."""
        if not self._supervised:
            self.popen.send_signal(sig)
        elif said := re.search(r"^process (\d+)$", self.log.read_text(), re.MULTILINE):
            os.kill(int(said[1]), sig)

    def kill_rank(self) -> None:
        """Kill one of the other ranks of its model, whichever."""
        os.kill(random.choice(ranks_below(self.popen.pid)), signal.SIGKILL)

    def until(self, ready: Callable[[], Any]) -> None:
        """Wait for it while the process lives. Raises RuntimeError with its output otherwise."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} is not ready:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.02)


class System:
    """`options`: further arguments of each worker; `supervised`: each has a supervisor, as under `penstock up`."""

    def __init__(self, folder: Path, url: str, redis: Redis, options: Sequence[str], supervised: bool) -> None:
        self.folder, self.url, self.redis = folder, url, redis
        self._options, self._supervised = options, supervised
        self._count = 0
        self.workers: list[Process] = []
        self.gateways: dict[int, Process] = {}

    def start_worker(self) -> Process:
        """Start a worker and return at once."""
        self._count += 1
        name = f"w{self._count}"
        argv = ["worker", "--model", "tiny", "--name", name, "--threads", "1", *self._options]
        return Process(self.folder, name, self.url, *argv, supervised=self._supervised)

    def add_worker(self) -> Process:
        """Start a worker; return once it takes tasks."""
        worker = self.start_worker()
        worker.until(lambda: "Ready in" in worker.log.read_text() and self.incarnation(worker))
        self.workers.append(worker)
        return worker

    def add_gateway(self, port: int | None = None) -> int:
        """Start a gateway, also again on a port that it had; return its port once it is ready."""
        port = port or free_port()
        gateway = Process(self.folder, f"gateway-{port}", self.url, "gateway", "--port", str(port))
        gateway.until(Gateway(f"http://127.0.0.1:{port}").ready)
        self.gateways[port] = gateway
        return port

    def incarnation(self, worker: Process) -> str:
        """The worker's name in the broker's books now; empty if it has none."""
        return next((one for one in self.incarnations() if one.startswith(f"{worker.name}.")), "")

    def incarnations(self) -> list[str]:
        found: list[str] = self.redis.hkeys(broker_keys.INCARNATIONS)  # type: ignore[assignment]
        return found

    def said(self, what: str) -> int:
        """How many lines of logs, also of those that are dead, say it."""
        return sum(log.read_text().count(what) for log in self.folder.glob("*.log"))

    def stop(self) -> None:
        for process in (*self.workers, *self.gateways.values()):
            process.popen.kill()
            process.popen.wait(PATIENCE_S)


@contextmanager
def running(workers: int, gateways: int, *options: str, supervised: bool = False) -> Iterator[System]:
    """A system that is ready."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-failover-")))
        url, redis = stack.enter_context(valkey())
        system = System(folder, url, redis, options, supervised)
        stack.callback(system.stop)
        for _ in range(workers):
            system.add_worker()
        for _ in range(gateways):
            system.add_gateway()
        yield system
