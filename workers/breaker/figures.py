"""A worker's figures of its last minute, by which peers compare themselves: tasks ended and failed, times of steps.

Format in the lease's `figures`, one JSON object; what makes no sense is left out by readers:

    machine   the kind of machine; times are compared between equal ones only
    ended     tasks that the engine completed or failed
    failed    those that it failed, by its own fault as far as anyone can tell
    steps     {"tokens,context": [steps, seconds]}: steps that only decoded

A step's key is its tokens and the KV tokens that it reads, each by its number of bits. A step's time is linear in the
two, so that steps of one key differ by less than a factor of 2 on equal machines, whatever their load.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

from engine.plan import StepWork
from producers.contract.profile import sane

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


@dataclass(frozen=True, slots=True)
class Figures:
    """See the module's head. `steps`: key -> (steps, seconds of one)."""

    machine: str = ""
    ended: int = 0
    failed: int = 0
    steps: dict[Key, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, said: Any) -> Self:
        """Figures from parsed JSON of whatever kind."""
        said = said if isinstance(said, dict) else {}
        steps = said.get("steps")
        found = {}
        for name, one in steps.items() if isinstance(steps, dict) else ():
            key, times = _key_of(name), [sane(part) for part in one] if isinstance(one, list) else []
            if key is not None and len(times) == 2 and times[0] and times[1]:
                found[key] = (int(times[0]), times[1])
        ended, failed = (int(sane(said.get(name)) or 0) for name in ("ended", "failed"))
        return cls(str(said.get("machine", "")), ended, min(failed, ended), found)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
            if (one := steps.get(key)) is None:
                steps[key] = [1, work.seconds]  # whole at once: who reads divides by the steps
            else:
                one[0] += 1
                one[1] += work.seconds

    def on_end(self, *, failed: bool) -> None:
        """The publisher's thread: a task was completed, or the engine failed it."""
        now = self._now()
        now.ended += 1
        now.failed += failed

    def forget(self) -> None:
        """Begin anew: what was measured before the worker was ejected proves nothing afterwards."""
        self._slices = deque([_Slice(self._clock())], maxlen=SLICES)

    def figures(self, slices: int = SEEN_SLICES, steps: int = SEEN_STEPS) -> Figures:
        """The window's figures. Keys that were seen in fewer slices, or fewer steps, are left out."""
        self._now()
        kept = list(self._slices)
        seen: dict[Key, list[tuple[float, float]]] = {}
        for one in kept:
            for key, (count, seconds) in list(one.steps.items()):
                seen.setdefault(key, []).append((count, seconds / count))
        found = {
            key: (int(sum(count for count, _ in parts)), median(mean for _, mean in parts))
            for key, parts in seen.items()
            if len(parts) >= slices and sum(count for count, _ in parts) >= steps
        }
        most = sorted(found, key=lambda key: -found[key][0])[:KEYS]
        ended, failed = sum(one.ended for one in kept), sum(one.failed for one in kept)
        return Figures(self._machine, ended, failed, {key: found[key] for key in most})

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
