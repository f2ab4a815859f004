"""Circuit breaking: a worker whose engine fails, or is far slower than its peers', takes no tasks until a probe passes.

    engine's thread   a step ─▶ Window ─▶ Figures ─▶ the lease
    publisher         a task's end ─▶ Window, Breaker
    housekeeper       peers' leases ─▶ judge ─▶ EJECT ─▶ Breaker ─▶ probe, on its own engine ─▶ half open ─▶ closed

Each worker judges itself (docs/how/breaker.md).

**Figures** of a worker's last minute: tasks ended and failed, times of steps. And how far they are off its peers'.

Format in the lease's `figures`, one JSON object; readers leave out bad values:

    machine   the kind of machine; times are compared between equal ones only
    ended     tasks that the engine completed or failed
    failed    those that it failed, by its own fault as far as is known
    steps     {"tokens,context": [steps, seconds]}: steps that only decoded

A step's key is its tokens and the KV tokens that it reads, each by its number of bits. A step's time is linear in the
two, so that steps of one key differ by less than a factor of 2 on equal machines, whatever their load.

`judge` has two reasons, as Envoy's outlier detection and gRPC's (gRFC A50) have, each with a least number of peers and
of cases:

Failures: the share of tasks that its engine failed is larger than all peers' together, by FAILURES at least and by more
than chance gives (DEVIATIONS standard deviations). Bad requests reach all workers of a pool alike.

Slowness: its decode steps take FACTOR times as long as the middle peer's of the same size, and EXCESS_S longer. A slow
worker has more sequences at once than its peers. So where they lack a size, the bound is what they take for a larger
one, or for a smaller one times the difference. A step's time is linear in its size, so that on equal machines this is
off by less than 2, and no load makes a slow worker. Peers on other kinds of machines, and sizes that fewer than PEERS
peers have, are not compared.

A pool that is slow or fails as a whole has no outlier.

**States.** The state of a worker's breaker: closed, asking, open, half open. No I/O; docs/how/breaker.md has the whole.

publisher     failed, completed ─▶ asking, or closed again
housekeeper   open (an outlier), refused, on_idle ─▶ open, closed
clock         the probe, when it is due; the engine's thread has its answer ─▶ half open, or open for longer
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from engine.errors import NOT_FINITE, EngineError
from engine.plan import StepWork
from producers.contract.profile import sane
from workers.state.clock import Clock

#: Seconds of one slice of the window, and the slices that it has.
SLICE_S = 5.0
SLICES: Final = 12
#: A key counts once so many slices have it: one hiccup of the machine is in one of them.
SEEN_SLICES: Final = 3
#: Steps that a key must have.
SEEN_STEPS: Final = 10
#: Keys that are published: those of the most steps.
KEYS: Final = 12
Key = tuple[int, int]
#: Peers with whom a comparison is one.
PEERS: Final = 2
#: Ended tasks from which on a share of failures is one: a worker's own, and its peers' together.
ENDED: Final = 10
FAILURES: Final = 0.3
DEVIATIONS: Final = 4.0
FACTOR: Final = 3.0
EXCESS_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Figures:
    """See the module's head. `steps`: key -> (steps, seconds of one)."""

    machine: str = ""
    ended: int = 0
    failed: int = 0
    steps: dict[Key, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Any) -> Self:
        """Figures from parsed JSON of whatever kind."""
        data = data if isinstance(data, dict) else {}
        steps = data.get("steps")
        figures = {}
        for name, entry in steps.items() if isinstance(steps, dict) else ():
            key, times = _key_of(name), [sane(part) for part in entry] if isinstance(entry, list) else []
            if key is not None and len(times) == 2 and times[0] and times[1]:
                figures[key] = (int(times[0]), times[1])
        ended, failed = (int(sane(data.get(name)) or 0) for name in ("ended", "failed"))
        return cls(str(data.get("machine", "")), ended, min(failed, ended), figures)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        steps = {f"{tokens},{context}": [n, round(s, 6)] for (tokens, context), (n, s) in self.steps.items()}
        return {"machine": self.machine, "ended": self.ended, "failed": self.failed, "steps": steps}


def _key_of(name: str) -> Key | None:
    tokens, _, context = name.partition(",")
    # No number has more than 99 bits here, and Python reads none of more than 4,300 digits.
    sane = all(part.isdecimal() and len(part) <= 2 for part in (tokens, context))
    return (int(tokens), int(context)) if sane else None


@dataclass(slots=True)
class _Slice:
    began: float
    ended: int = 0
    failed: int = 0
    steps: dict[Key, list[float]] = field(default_factory=dict)
    """Key -> [steps, their seconds]."""


class Window:
    """The last SLICES slices of SLICE_S seconds. Two threads write, each its own part; any thread reads."""

    def __init__(self, machine: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._machine = machine
        self._clock = clock
        self._slices: deque[_Slice] = deque([_Slice(clock())], maxlen=SLICES)

    def on_step(self, work: StepWork) -> None:
        """The engine's thread. A step with a prompt is no measure: its time grows with the square of that."""
        if work.decodes and not work.prompt_tokens:
            key = (max(work.tokens, work.decodes).bit_length(), work.context.bit_length())
            steps = self._now().steps
            if (entry := steps.get(key)) is None:
                steps[key] = [1, work.seconds]  # whole at once: who reads divides by the steps
            else:
                entry[0] += 1
                entry[1] += work.seconds

    def on_end(self, *, failed: bool) -> None:
        """The publisher's thread: a task was completed, or the engine failed it."""
        now = self._now()
        now.ended += 1
        now.failed += failed

    def forget(self) -> None:
        """Drop all: what was measured before the worker was ejected proves nothing afterwards."""
        self._slices = deque([_Slice(self._clock())], maxlen=SLICES)

    def figures(self, slices: int = SEEN_SLICES, steps: int = SEEN_STEPS) -> Figures:
        """The window's figures. Keys that were seen in fewer slices, or fewer steps, are left out."""
        self._now()
        kept = list(self._slices)
        measured: dict[Key, list[tuple[float, float]]] = {}
        for part in kept:
            for key, (count, seconds) in list(part.steps.items()):
                measured.setdefault(key, []).append((count, seconds / count))
        means = {
            key: (int(sum(count for count, _ in parts)), median(mean for _, mean in parts))
            for key, parts in measured.items()
            if len(parts) >= slices and sum(count for count, _ in parts) >= steps
        }
        busiest = sorted(means, key=lambda key: -means[key][0])[:KEYS]
        ended, failed = sum(part.ended for part in kept), sum(part.failed for part in kept)
        return Figures(self._machine, ended, failed, {key: means[key] for key in busiest})

    def _now(self) -> _Slice:
        """The present slice. Those of times in which nothing was entered are there, too: they push old ones out."""
        now = self._clock()
        if now - self._slices[-1].began >= SLICE_S * SLICES:
            self.forget()
        slices = self._slices
        while now - slices[-1].began >= SLICE_S:
            slices.append(_Slice(slices[-1].began + SLICE_S))
        return slices[-1]


def kind_of(device: str) -> str:
    """`device`: where the engine computes, as torch names it. A GPU's name, or the CPU's with the number of its cores
    that this process may use; of a CPU that nobody names, the cores alone."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu()} x {cores}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


@dataclass(frozen=True, slots=True)
class Slowness:
    """Mean seconds of this worker's comparable steps, and of its peers' for the same steps."""

    mine: float
    peers: float

    @property
    def ratio(self) -> float:
        return self.mine / self.peers

    @property
    def far(self) -> bool:
        return self.ratio >= FACTOR and self.mine - self.peers >= EXCESS_S


def judge(mine: Figures, peers: Sequence[Figures]) -> str:
    """The reason why this worker is an outlier among its peers; empty if it is none."""
    if reason := failures(mine, peers):
        return reason
    slow = slowness(mine, peers)
    if slow is None or not slow.far:
        return ""
    return f"its decode steps take {slow.ratio:.1f} times as long as its peers' ({1e3 * slow.mine:.1f} ms)"


def failures(mine: Figures, peers: Sequence[Figures]) -> str:
    """The reason why it fails too many tasks; empty if it does not."""
    measured = [peer for peer in peers if peer.ended]
    ended, failed = sum(peer.ended for peer in measured), sum(peer.failed for peer in measured)
    if len(measured) < PEERS or min(mine.ended, ended) < ENDED:
        return ""
    share, theirs = mine.failed / mine.ended, failed / ended
    both = (mine.failed + failed) / (mine.ended + ended)
    chance = sqrt(both * (1 - both) * (1 / mine.ended + 1 / ended))
    if share - theirs < max(FAILURES, DEVIATIONS * chance):
        return ""
    return f"its engine failed {mine.failed} of {mine.ended} tasks, its peers' {failed} of {ended}"


def slowness(mine: Figures, peers: Sequence[Figures]) -> Slowness | None:
    """The comparison of decode steps; None if nothing can be compared."""
    alike = [peer for peer in peers if peer.machine == mine.machine]
    expected_s = {
        key: expected for peer in alike for key in peer.steps if (expected := _middle(key, alike)) is not None
    }
    if not expected_s or not mine.steps:
        return None
    steps = sum(count for count, _ in mine.steps.values())
    own_s = sum(count * seconds for count, seconds in mine.steps.values())
    theirs = sum(count * _at_most(key, expected_s) for key, (count, _) in mine.steps.items())
    return Slowness(own_s / steps, theirs / steps) if theirs else None


def _middle(key: Key, peers: Sequence[Figures]) -> float | None:
    """Seconds of the middle peer's steps of this key."""
    seconds = [peer.steps[key][1] for peer in peers if key in peer.steps]
    return median(seconds) if len(seconds) >= PEERS else None


def _at_most(key: Key, expected_s: Mapping[Key, float]) -> float:
    """Seconds that peers would take for a step of this key, or less: a larger step takes no less, and one of twice the
    size at most twice as long."""
    return min(seconds * 2.0 ** max(0, key[0] - k[0], key[1] - k[1]) for k, seconds in expected_s.items())


logger = logging.getLogger(__name__)

#: Tasks in a row that the engine fails before a probe tells whether it is to blame.
IN_A_ROW: Final = 3
#: Seconds after a probe that passed in which failures in a row are the requests'.
TRUSTED_S: Final = 10.0
#: Seconds from an opening to its probe: the first, and the most that they grow to.
FIRST_S = 10.0
MOST_S: Final = 300.0
#: Openings after which that time grows no more.
LONGEST_STREAK: Final = 6
#: Seconds closed after which an opening counts for less.
FORGET_S: Final = 60.0
#: Seconds half open without a task after which it is closed.
TRIAL_S = 30.0
#: Failed probes in a row after which only a new process may help.
GIVE_UP: Final = 5
#: Steps of a probe by which its speed is judged.
STEPS: Final = 8

SendProbe = Callable[[Callable[[str | None], None]], None]


class State(StrEnum):
    CLOSED = "closed"
    ASKING = "asking"
    """Tasks failed in a row: its engine is probed at once. It fetches nothing meanwhile."""
    OPEN = "open"
    HALF_OPEN = "half_open"
    """It takes one task at a time, until one ends well."""


class Breaker:
    """Thread-safe. `enabled`: whether it may open. `send_probe` sends a probe to the engine and calls back on the
    engine's thread, with the error, or None; it raises EngineError if the engine takes none now. `give_up` ends this
    worker, with a reason. `explain`: which part of the engine is slow, if that is known."""

    def __init__(
        self,
        window: Window,
        clock: Clock,
        send_probe: SendProbe,
        give_up: Callable[[str], None],
        *,
        enabled: bool = True,
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        self._enabled = enabled
        self._explain = explain
        self._window = window
        self._clock = clock
        self._send_probe = send_probe
        self._give_up = give_up
        self._lock = threading.RLock()
        self._in_a_row = self._streak = self._failed_probes = self._turn = 0
        self._since = self._closed_at = time.monotonic()
        self._trusted_until = 0.0
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when the state has changed."""
        self.state = State.CLOSED
        self.why = ""
        self.alone = False
        """It fails by itself, whatever its peers do."""
        self.openings = 0
        self.failures = 0
        """Tasks that its engine failed."""
        self.peers: Sequence[Figures] = ()
        """The figures of peers that are not held back, as last read."""

    # ---- how it is ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def room(self) -> int | None:
        """Deliveries that the worker may hold; None: as many as fit."""
        return {State.CLOSED: None, State.HALF_OPEN: 1}.get(self.state, 0)

    @property
    def reason(self) -> str:
        """The reason why it is not ready; empty while it is closed."""
        return "" if self.closed else f"its breaker is {self.state.replace('_', ' ')}: {self.why}"

    def slowness(self) -> Slowness | None:
        """Its decode steps against its peers'."""
        return slowness(self._window.figures(), self.peers)

    def outlier(self) -> str:
        """The reason why it is an outlier among its peers; empty if it is none, or may not open."""
        reason = judge(self._window.figures(), self.peers) if self._enabled and self.closed else ""
        return f"{reason}; {why}" if reason and (why := self._explain()) else reason

    def to_dict(self) -> dict[str, Any]:
        """All of it, for `inspect breaker`."""
        slow = self.slowness()
        return {
            "state": self.state,
            "why": self.why,
            "openings": self.openings,
            "engine_failures": self.failures,
            "slowness": slow and round(slow.ratio, 2),
            "peers": len(self.peers),
            "figures": self._window.figures().to_dict(),
        }

    # ---- the publisher's thread -----------------------------------------------------------------------------------

    def failed(self) -> bool:
        """Notes a task that the engine failed by its own fault. Returns whether to give it back, with no try spent."""
        with self._lock:
            self.failures += 1
            self._window.on_end(failed=True)
            if self.state is State.HALF_OPEN:
                self._open("the task that it was given to prove itself failed", alone=self.alone)
            elif self.closed:
                self._in_a_row += 1
                if self._enabled and self._in_a_row >= IN_A_ROW and time.monotonic() >= self._trusted_until:
                    self.alone = True
                    self._become(State.ASKING, f"its engine failed {self._in_a_row} tasks in a row")
                    self._probe_in(0.0)
            return not self.closed

    def completed(self) -> None:
        """Notes a completed task."""
        with self._lock:
            self._window.on_end(failed=False)
            self._in_a_row = 0
            if self.state is State.HALF_OPEN:
                self._close("a task ended well")

    # ---- the housekeeper's thread ---------------------------------------------------------------------------------

    def open(self, why: str) -> None:
        """Opens: it is an outlier, and the share has room for it."""
        with self._lock:
            if self.closed:
                self._open(why, alone=False)

    def refused(self) -> None:
        """Closes: the share has no room for it any more, so that it has to serve."""
        with self._lock:
            if not self.closed:
                self._close("too many of its pool's workers are held back")

    def on_idle(self) -> None:
        """Closes a worker on trial that holds nothing and got no task for long."""
        with self._lock:
            if self.state is State.HALF_OPEN and time.monotonic() - self._since >= TRIAL_S:
                self._close(f"no task came for {TRIAL_S:.0f} s")

    # ---- changes --------------------------------------------------------------------------------------------------

    def _probe_in(self, seconds: float) -> None:
        self._clock.later(seconds, partial(self._probe, self._turn))

    def _probe(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._window.forget()
        try:
            self._send_probe(self._answered)
        except EngineError as exc:
            logger.info("No probe is sent: %s", exc)
            self._probe_in(FIRST_S)

    def _answered(self, error: str | None) -> None:
        """The engine's thread: the probe has ended."""
        with self._lock:
            if self.closed:
                return
            slow = slowness(self._window.figures(1, STEPS), self.peers)
            if error is not None:
                self._probe_failed(error)
            elif self.state is State.ASKING:
                self._trusted_until = time.monotonic() + TRUSTED_S
                self._close("it answers a probe, so that the requests are to blame")
            elif slow is not None and slow.far:
                self._open(f"a probe took {slow.ratio:.1f} times as long as peers would", alone=False)
            else:
                self._failed_probes = 0
                self._become(State.HALF_OPEN, "it takes one task to prove itself")

    def _probe_failed(self, error: str) -> None:
        self._failed_probes += 1
        if error == NOT_FINITE or self._failed_probes >= GIVE_UP:
            self._give_up(f"its engine failed {self._failed_probes} probes in a row: {error}")
        self._open(f"its engine fails a probe: {error}", alone=True)

    def _open(self, why: str, *, alone: bool) -> None:
        if self.state in (State.CLOSED, State.ASKING):
            self.openings += 1
            self._streak = max(0, self._streak - int((time.monotonic() - self._closed_at) / FORGET_S))
        self._streak = min(self._streak + 1, LONGEST_STREAK)
        self.alone = alone
        delay = min(MOST_S, FIRST_S * 2 ** (self._streak - 1))
        self._become(State.OPEN, why)
        self._probe_in(delay)
        logger.error("This worker takes no tasks: %s. A probe in %.0f s", why, delay)

    def _close(self, why: str) -> None:
        self._window.forget()
        self._in_a_row = self._failed_probes = 0
        self.alone = False
        self._closed_at = time.monotonic()
        self._become(State.CLOSED, "")
        logger.warning("This worker takes tasks again: %s", why)

    def _become(self, state: State, why: str) -> None:
        self._since = time.monotonic()
        self._turn += 1
        self.state, self.why = state, why
        self.on_change()
