"""A clairvoyant schedule: few worker-hours, with all arrivals known ahead.

It is held to the same worker, cold start and maximum, and to the objective: a share of the priority tasks have their
first token in time. All other tasks need only end within an hour (the longest target wait) of the last arrival.

1. For each slot of `SLOT` seconds: the most priority sequences in flight, had each room at once. `need` is the number
   of workers that hold them at `fill` times the knee, and at least one. They are ordered a cold start ahead.
2. All other work is a fluid that fills what they leave: what has arrived and is not done. From some time on, at least
   `level` workers are up until all is done. That time is as late as it can be, so that they never run out of work.
3. Each candidate runs in the simulator; one that misses the objective or the end is no schedule. The search takes the
   highest `fill` that holds, then the cheapest `level` from the lowest on.

No schedule whatever needs fewer worker-hours than all work divided by what one worker does (`Outcome.work_s`). The
summary shows that bound, too: the schedule lies above it by its starts and the rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from workers.autoscaler.simulate.scalers import Schedule
from workers.autoscaler.simulate.simulation import Outcome, Simulation
from workers.autoscaler.simulate.trace import Arrival
from workers.autoscaler.simulate.worker import WorkerModel

#: Length (s) of a slot of the schedule.
SLOT: Final = 60.0
#: Time (s) after the last arrival by which all is done.
REST: Final = 3600.0
#: Fills of a worker with priority sequences, in knees, that are tried, from the cheapest.
FILLS: Final = (2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4)
#: Levels that are tried above the lowest.
LEVELS: Final = 4
#: Share of a worker's throughput that a plan counts on: paused and handed back tasks compute tokens again.
YIELD: Final = 0.97


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest schedule that holds; None if none does."""

    outcome: Outcome | None
    fill: float = 0.0
    level: int = 0


def clairvoyant(
    arrivals: Sequence[Arrival],
    model: WorkerModel,
    most: int,
    holds: Callable[[Outcome], bool],
    note: Callable[[float], None] = lambda at: None,
) -> Found:
    """`holds`: whether an outcome meets the objective. `note` hears of the simulations' progress."""
    plan = _Plan(arrivals, model, most)

    def tried(fill: float, level: int) -> Outcome | None:
        out = Simulation(arrivals, model, Schedule(plan.steps(fill, level)), note).run()
        return out if holds(out) and out.ended_at <= plan.end else None

    lowest = plan.lowest()
    for fill in (fill for fill in FILLS if fill * model.knee <= model.slots):
        if tried(fill, lowest + 1) is None:
            continue
        outcomes = [(out.worker_s, level, out) for level in plan.levels(lowest) if (out := tried(fill, level))]
        if outcomes:
            _, level, out = min(outcomes, key=lambda one: one[:2])
            return Found(out, fill, level)
    return Found(None)


class _Plan:
    """Slots of a trace: priority sequences in flight, and work that arrives (s of one worker)."""

    def __init__(self, arrivals: Sequence[Arrival], model: WorkerModel, most: int) -> None:
        self._model, self._most = model, most
        self.end = arrivals[-1].at + REST
        slots = ceil(self.end / SLOT) + 1
        self._work = [0.0] * slots
        for one in arrivals:
            self._work[int(one.at / SLOT)] += model.work(one.prompt, one.output) / model.tokens_per_s / YIELD
        self._priority = self._in_flight(arrivals, slots)

    def _in_flight(self, arrivals: Sequence[Arrival], slots: int) -> list[int]:
        """The most priority sequences in flight in each slot, with room for all."""
        model = self._model
        events = [(one.at, 1) for one in arrivals if one.rank == 0]
        events += [
            (one.at + model.work(one.prompt, one.output) * model.knee / model.tokens_per_s, -1)
            for one in arrivals
            if one.rank == 0
        ]
        found, now, events = [0] * slots, 0, sorted(events)
        place = 0
        for slot in range(slots):
            most = now
            while place < len(events) and events[place][0] < (slot + 1) * SLOT:
                now += events[place][1]
                most, place = max(most, now), place + 1
            found[slot] = most
        return found

    def _need(self, fill: float) -> list[int]:
        room = fill * self._model.knee
        return [min(self._most, max(1, ceil(number / room))) for number in self._priority]

    def lowest(self) -> int:
        """The lowest level that can do all work by the end."""
        need = self._need(FILLS[0])
        for level in range(1, self._most):
            if self._left(need, level, 0) <= 0:
                return level
        return self._most

    def levels(self, lowest: int) -> list[int]:
        return [level for level in range(lowest, lowest + LEVELS) if level <= self._most]

    def _left(self, need: Sequence[int], level: int, since: int) -> float:
        """Work that is left at the end, with at least `level` workers from slot `since` on."""
        left = 0.0
        for slot, number in enumerate(need):
            workers = max(number, level) if slot >= since else number
            left = max(0.0, left + self._work[slot] - workers * SLOT)
        return left

    def steps(self, fill: float, level: int) -> list[tuple[float, int]]:
        """The schedule: numbers of workers, and when they are ordered."""
        need = self._need(fill)
        early, late = 0, len(need)
        while late - early > 1:  # the latest slot from which on the level does all
            since = (early + late) // 2
            early, late = (since, late) if self._left(need, level, since) <= 0 else (early, since)
        numbers = [max(number, level) if slot >= early else number for slot, number in enumerate(need)]
        lead = ceil(self._model.cold_start / SLOT)
        ahead = [max(numbers[slot : slot + lead + 1]) for slot in range(len(numbers))]
        return [(slot * SLOT, number) for slot, number in enumerate(ahead)]
