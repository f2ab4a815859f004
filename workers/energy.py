"""Energy that a worker's device draws, from a meter, and the parts of it: steps, idle time, starts.

    NVML's counter or power (`GpuFacts`) ─┐
    RAPL's counters of the packages ──────┼▶ Meter.read ─▶ EnergyAccount ─▶ joules by state ─▶ counters of the model
    processor time * stated watts ────────┘                       └▶ watts in steps ─▶ the engine: a part for each task

A counter is read now and then, and steps end between two readings. So each step is charged at the power of the readings
before, and what they turn out to have drawn more or less is charged to the next steps. What all tasks are charged
differs from the meter by some seconds' worth.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from producers.contract.profile import sane
from workers.processes.proc import processor_time_of

#: Where Linux shows the energy counters of processors.
POWERCAP: Final = Path("/sys/class/powercap")
#: A package: all of a socket. Its parts (cores, memory) have longer names.
_PACKAGE: Final = re.compile(r"intel-rapl:\d+")
PROC_STAT: Final = Path("/proc/stat")
#: The share of each new interval in the mean power of steps, and of idle time.
SMOOTHING: Final = 0.25
#: Readings, a second apart or more, over which what was charged too little or too much is made good.
SPREAD: Final = 4.0
#: No step is charged more than so many times the mean power of steps.
LARGEST: Final = 3.0
#: Time (s) after which a GPU's power says nothing of the time since.
STALE_S: Final = 30.0


class ProcessorTime:
    """Processor time of a worker: of this process, of its engine's, and of the model's other ranks on this machine.
    `engine`: in this process, or a `workers.engine_process.front.ProcessEngine`. Not thread-safe."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._own = getattr(engine, "processor_time", time.process_time)
        self._ranks: dict[int, float] = {}

    def __call__(self) -> float:
        """Seconds. Of a rank that has ended, those that were read last."""
        for pid in getattr(self._engine.stats(), "rank_processes", ()):
            with suppress(OSError):
                self._ranks[pid] = processor_time_of(pid)
        return float(self._own() + sum(self._ranks.values()))


#: (when it was read (monotonic), joules since some time in the past). Readings that are not new change nothing.
Reading = tuple[float, float]


class Meter(Protocol):
    def read(self) -> Reading | None:
        """The energy that this worker's device has drawn for it; None if that cannot be read now. It never falls."""


class NvmlMeter:
    """The energy of a whole GPU. `facts`: when they were read (monotonic), and what the driver said
    (`workers.runtime.gpu_facts`)."""

    def __init__(self, facts: Callable[[], tuple[float, Mapping[str, Any]] | None]) -> None:
        self._facts = facts
        self._joules = 0.0
        self._last: tuple[float, float | None, float | None] | None = None

    def read(self) -> Reading | None:
        facts = self._facts()
        if facts is None:
            return None
        at, values = facts
        counter, watts = sane(values.get("energy_joules")), sane(values.get("power_watts"))
        if counter is None and watts is None:
            return None
        last = self._last
        if last is not None and at <= last[0]:
            return last[0], self._joules
        self._joules += 0.0 if last is None else self._drawn(last, at, counter, watts)
        self._last = at, counter, watts
        return at, self._joules

    @staticmethod
    def _drawn(
        last: tuple[float, float | None, float | None], at: float, counter: float | None, watts: float | None
    ) -> float:
        """By the counter. Without one, and where it fell, by the mean power: it may count from zero since the driver
        was loaded anew, and then no more than it shows; or it was read wrong, and shows all that the GPU ever drew."""
        before, counted, drew = last
        if counter is not None and counted is not None and counter >= counted:
            return counter - counted
        powers = [power for power in (drew, watts) if power is not None]
        drawn = sum(powers) / len(powers) * min(at - before, STALE_S) if powers else 0.0
        return drawn if counter is None or counted is None else min(drawn, counter)


class RaplMeter:
    """This process's part of the energy of the machine's processors: by its part of the processor time that all
    processes used. `processor_time`: seconds of this process."""

    def __init__(
        self,
        root: Path = POWERCAP,
        stat: Path = PROC_STAT,
        processor_time: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
        ticks: float = 100.0,
    ) -> None:
        """Raises OSError where the counters cannot be read: there are none, or only root may."""
        self._packages = sorted(path for path in root.glob("intel-rapl:*") if _PACKAGE.fullmatch(path.name))
        if not self._packages:
            raise FileNotFoundError(f"{root} has no intel-rapl")
        self._ranges = [int((path / "max_energy_range_uj").read_text()) for path in self._packages]
        self._stat, self._processor_time, self._clock, self._ticks = stat, processor_time, clock, ticks
        self._joules = 0.0
        self._last = self._counters()

    def _counters(self) -> tuple[list[int], float, float]:
        """The packages' microjoules; seconds of all processes, and of this one."""
        energy = [int((path / "energy_uj").read_text()) for path in self._packages]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, self._stat.read_text().split("\n", 1)[0].split()[1:9]
        )
        return energy, (user + nice + system + irq + softirq + steal) / self._ticks, self._processor_time()

    def read(self) -> Reading | None:
        try:
            now = self._counters()
        except (OSError, ValueError):
            return None
        (energy, busy, own), (energy_before, busy_before, own_before) = now, self._last
        used = own - own_before
        if used > 0 and busy - busy_before < 2 / self._ticks:
            return self._clock(), self._joules  # too short for the kernel's ticks: with the next
        self._last = now
        # A counter begins again at zero behind its range.
        drawn = sum(
            (after - before) % (largest + 1)
            for after, before, largest in zip(energy, energy_before, self._ranges, strict=True)
        )
        if used > 0:
            self._joules += drawn / 1e6 * min(1.0, used / (busy - busy_before))
        return self._clock(), self._joules


class StatedMeter:
    """Processor time of this process at so many watts of a core."""

    def __init__(self, watts: float, processor_time: Callable[[], float] = time.process_time) -> None:
        self._watts = watts
        self._processor_time = processor_time

    def read(self) -> Reading | None:
        return time.monotonic(), self._watts * self._processor_time()


def open_meter(
    device: str,
    facts: Callable[[], tuple[float, Mapping[str, Any]] | None],
    core_watts: float | None,
    processor_time: Callable[[], float] = time.process_time,
) -> Meter | None:
    """The meter of an engine's device, as torch names it; None without one: then no energy is told. `processor_time`:
    seconds of the worker."""
    if device.startswith("cuda"):
        return NvmlMeter(facts)
    try:
        return RaplMeter(processor_time=processor_time)
    except (OSError, ValueError):
        return None if core_watts is None else StatedMeter(core_watts, processor_time)


class EnergyAccount:
    """The energy that a worker's device drew, by state. Not thread-safe. `shared`: whether other workers compute on it;
    then only what is drawn in this worker's own steps counts."""

    def __init__(self, meter: Meter, *, shared: bool = False) -> None:
        self._meter = meter
        self._shared = shared
        self.starting = self.idle = self.busy = 0.0
        """Joules."""
        self.watts = 0.0
        """What each second of the next steps is charged with."""
        self._charged = 0.0
        self._last: tuple[float, float] | None = None
        self._worked = self._completed = 0.0
        self._idle_watts: float | None = None
        self._busy_watts: float | None = None

    def update(self, completed: float, stepping: float, ready_at: float | None) -> None:
        """Read the meter. `completed`: seconds of all steps that have ended; `stepping`: those of the present one;
        `ready_at`: when the worker began to take tasks (monotonic), None before."""
        self._charged += self.watts * (completed - self._completed)
        self._completed = completed
        reading = self._meter.read()
        if reading is None:
            return
        at, joules = reading
        before = self._last
        if before is not None and at <= before[0]:
            return
        self._last = reading
        began, drawn = (at, joules) if before is None else (before[0], joules - before[1])
        worked, self._worked = completed + stepping - self._worked, completed + stepping
        if before is None or ready_at is None or at <= ready_at:
            self.starting += drawn
            return
        worked = min(at - began, max(0.0, worked))
        self._enter(drawn, at - began, worked)
        self._set_watts(worked, stepping)

    def _enter(self, drawn: float, seconds: float, worked: float) -> None:
        """Divide what was drawn in a time in which steps took so long."""
        idle = seconds - worked
        if not self._shared and worked < 0.01 * seconds:
            self._idle_watts = _smoothed(self._idle_watts, drawn / seconds)
            self.idle += drawn
            return
        powers = drawn / seconds if self._idle_watts is None else min(self._idle_watts, drawn / seconds)
        at_rest = powers * idle
        if self._shared:
            drawn, at_rest = drawn - at_rest, 0.0
        self.idle += at_rest
        self.busy += drawn - at_rest
        if worked:
            self._busy_watts = _smoothed(self._busy_watts, (drawn - at_rest) / worked)

    def _set_watts(self, worked: float, stepping: float) -> None:
        """`worked`: about the time of steps until the next reading."""
        power = self._busy_watts
        if power is None:
            return
        owed = self.busy - self._charged - power * stepping
        self.watts = min(LARGEST * power, max(0.0, power + owed / (SPREAD * max(1.0, worked))))


def _smoothed(mean: float | None, value: float) -> float:
    return value if mean is None else mean + SMOOTHING * (value - mean)
