"""Processes that are looked after: whatever ends, is started again, and it is written down how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tests.processes import ROOT
from tests.processes import guarded as guard
from tests.waiting import suspend
from workers.trials.chaos.checker.case import Journal

#: How often it is looked whether a process has ended (s).
LOOK_S = 0.05


def guarded(argv: Sequence[str], env: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    """A process that ends when this one does."""
    out = subprocess.DEVNULL if log is None else log.open("ab")
    try:
        return subprocess.Popen(guard(*argv), cwd=ROOT, env={**os.environ, **env}, stdout=out, stderr=subprocess.STDOUT)
    finally:
        if log is not None:
            out.close()


class Running(Protocol):
    """What a slot asks of its process; see subprocess.Popen."""

    pid: int

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Slot:
    """A process, and those that take its place after it. `make(generation)` gives its command line, environment and
    name; `serves(process)` whether it is of use yet; `start` starts a command line."""

    def __init__(
        self,
        name: str,
        role: str,
        make: Callable[[int], tuple[Sequence[str], Mapping[str, str], str]],
        serves: Callable[[str], bool],
        journal: Journal,
        logs: Path,
        start: Callable[[Sequence[str], Mapping[str, str], Path], Running] = guarded,
    ) -> None:
        self.name, self.role = name, role
        self._run = start
        self._make, self._serves = make, serves
        self._journal, self._logs = journal, logs
        self._generation = 0
        self._asked = self._served = self._written = False
        self._lock = threading.Lock()
        self.paused = False
        self.process = ""
        self.running = True
        """Whether another is started when it ends."""
        self._start()

    def _start(self) -> None:
        self._generation += 1
        argv, env, self.process = self._make(self._generation)
        self._asked = self._served = self._written = self.paused = False
        self._popen = self._run(argv, env, self._logs / f"{self.name}.{self._generation:04d}.log")

    @property
    def ready(self) -> bool:
        """It is of use, and nobody holds it still."""
        with self._lock:
            if self.paused or self._asked or self._popen.poll() is not None:
                return False
            return self._is_of_use()

    def _is_of_use(self) -> bool:
        if not self._served and self._serves(self.process):
            self._served = True
            self._journal.write("serves", target=self.name, process=self.process, role=self.role)
        return self._served

    @property
    def code(self) -> int | None:
        """The exit code, or None where it runs."""
        return self._popen.poll()

    def look(self) -> None:
        """Write down its end, and start the next."""
        with self._lock:
            code = self._popen.poll()
            if code is None:
                if not self.paused:
                    self._is_of_use()
                return
            if self._written:
                return
            self._written = True
            self._journal.write(
                "exit",
                target=self.name,
                process=self.process,
                role=self.role,
                code=code,
                asked=self._asked,
                served=self._served,
            )
            if self.running:
                self._start()

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def drain(self) -> None:
        self._send(signal.SIGTERM)

    def _send(self, sig: signal.Signals) -> None:
        with self._lock:
            if self._popen.poll() is None:
                self._asked = True
                self._popen.send_signal(sig)

    def pause(self) -> None:
        with self._lock:
            if self._popen.poll() is None:
                self.paused = True
                suspend(self._popen.pid)

    def resume(self) -> None:
        """Whoever was killed and replaced meanwhile runs."""
        with self._lock:
            if self.paused and self._popen.poll() is None:
                self._popen.send_signal(signal.SIGCONT)
            self.paused = False

    def retire(self) -> None:
        """Tell it to end, for good."""
        if self.running:
            self.running = False
            self.resume()
            self.drain()

    def stop(self, seconds: float) -> bool:
        """Wait for the end of one that was retired, and kill it after a while. Whether it ended by itself."""
        self.retire()
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
            return False
        return True


class Keeper(threading.Thread):
    """Looks after slots. Ends last: what it started dies with this thread."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        super().__init__(name="keeper", daemon=True)
        self._slots = slots
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            for slot in list(self._slots.values()):
                slot.look()

    def stop(self) -> None:
        """Once every slot was stopped."""
        self._over.set()
        self.join()
