"""The cold start of this process, by phase: from the start of the process until it takes tasks.

A worker's phases:

    process     the process exists .............. first line of our code
    imports     Python modules: the command line, torch, the engine; where it began ahead, the wait for its command line
    weights     the model is found, checked and read; on a CPU with tokenizer and KV cache
    compile     on a GPU: kernels are compiled or found in their cache, memory is measured, steps are recorded
    warm_up     the model's first token, after a prompt of our own
    connect     servers asked, model announced, lease taken, Celery's consumer up
    total       all of these
    first_token from then, or from the claim of the first task if that comes later, until its first token is published

The phases of `penstock up`, whose workers start beside its gateway:

    process     as above
    imports     the command line's modules; models are found, or downloaded
    store       the embedded Valkey is up; broker and store answer
    workers     all workers take tasks, each after its own phases
    gateway     the gateway is ready, where that comes later

`mark(phase)` says that what has passed since the last mark was that phase, so that phases sum up to the total. One
thread makes the marks. What runs beside (Celery and the worker's parts are imported beside the load) counts where that
thread waits for it. Imports nothing that takes time.
"""

from __future__ import annotations

import os
import time

#: A process that is older when it makes its first mark was not started to serve: its age says nothing.
OLDEST_S = 600.0


class ColdStart:
    """The phases of one start (s). A process that was a standby begins anew when it is handed a program."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._phases: dict[str, float] = {}
        self._ready_at: float | None = None
        self.from_standby = False
        """Whether the process was a standby."""

    def begin(self) -> None:
        """Begins anew, without earlier marks: a standby is handed a program."""
        self._last, self._phases, self._ready_at, self.from_standby = time.monotonic(), {}, None, True

    def mark(self, phase: str) -> None:
        """Count the time since the last mark, or since the process's start, as `phase`."""
        now = time.monotonic()
        since = self._last if self._last is not None else now - age()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - since
        self._last = now

    def adopt(self, phases: dict[str, float]) -> None:
        """Take over the phases (s) of a process that was forked from this one, and has loaded the model since."""
        now = time.monotonic()
        since = now if self._last is None else self._last
        elapsed = sum(self._phases.values()) + now - since
        self._phases, self._last = dict(phases), now - max(0.0, elapsed - sum(phases.values()))

    def ready(self) -> bool:
        """Marks the time from which the worker takes tasks. False if it was marked before, as when Celery's consumer
        connects again."""
        if self._ready_at is not None:
            return False
        self.mark("connect")
        self._ready_at = self._last
        return True

    @property
    def ready_at(self) -> tuple[float, float] | None:
        """The time that the start took (s), and when it was over (monotonic); None until then."""
        if self._ready_at is None:
            return None
        return sum(seconds for name, seconds in self._phases.items() if name != "first_token"), self._ready_at

    def first_token(self, claimed_at: float) -> None:
        """Marks the publishing of a task's first token; it was claimed then (monotonic). Any thread; later calls do
        nothing."""
        if self._ready_at is not None and "first_token" not in self._phases:
            self._phases["first_token"] = max(0.0, time.monotonic() - max(self._ready_at, claimed_at))

    @property
    def figures(self) -> dict[str, float]:
        """The phases so far, and their total once it is ready."""
        phases = dict(self._phases)
        if self._ready_at is not None:
            phases["total"] = sum(seconds for name, seconds in phases.items() if name != "first_token")
        return {name: round(seconds, 4) for name, seconds in phases.items()}

    def __str__(self) -> str:
        """`2.31 s: process 0.05, imports 1.20, ...`."""
        phases = self.figures
        total = phases.pop("total", sum(phases.values()))
        return f"{total:.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


def age() -> float:
    """Returns the seconds since this process was started, to 10 ms; 0 if that cannot be known (macOS)."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            started = int(stat.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return seconds if 0 <= seconds <= OLDEST_S else 0.0


#: This process's.
COLD_START = ColdStart()
