"""A clairvoyant schedule: few worker-hours, with all arrivals known ahead.

It is held to the same worker, cold start, least and most workers, and to the objective: a share of the priority tasks
have their first token in time. All other tasks need only end within an hour (the longest target wait) of the last
arrival.

1. For each slot of `SLOT` seconds: the most priority sequences in flight, had each room at once. `need` is the number
   of workers that hold them at `fill` times the knee, and at least one. They are ordered a cold start ahead.
2. All other work is a fluid that fills what they leave: what has arrived and is not done. From some time on, at least
   `level` workers are up until the fluid is done. That time is as late as it can be, so that they never run out of
   work. Then the number halves from slot to slot, while the last sequences end.
3. Each candidate runs in the simulator; one that misses the objective or the end is no schedule. The search goes from
   the highest `fill` down, tries some levels of each, and stops after two that make nothing cheaper.

No schedule whatever needs fewer worker-hours than all work divided by what one worker does (`Outcome.work_s`). The
figures show that bound, too: the schedule lies above it by its starts, paused tasks and the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from workers.autoscaler.policy.rules import Rules
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
#: Fills in a row that make nothing cheaper, after which the search ends.
VAIN: Final = 2
#: Levels that are tried above the lowest.
LEVELS: Final = 4
#: Shares of a worker's throughput that a plan counts on, from the cheapest: paused tasks compute tokens again.
YIELDS: Final = (0.98, 0.95, 0.9)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that holds, and what became of it."""

    outcome: Outcome
    fill: float
    level: int


def clairvoyant(
    arrivals: Sequence[Arrival],
    model: WorkerModel,
    rules: Rules,
    holds: Callable[[Outcome], bool],
    note: Callable[[float], None] = lambda at: None,
) -> Found | None:
    """The cheapest schedule found; None if none holds.

    `holds`: whether an outcome meets the objective. `note` hears of the simulations' progress.
    """
    best, vain = None, 0
    for fill in (fill for fill in FILLS if fill * model.knee <= model.slots):
        found = _cheapest(arrivals, model, rules, fill, holds, note)
        if found is not None and (best is None or found.outcome.worker_s < best.outcome.worker_s):
            best, vain = found, 0
        elif best is not None and (vain := vain + 1) == VAIN:
            break
    return best


def _cheapest(
    arrivals: Sequence[Arrival],
    model: WorkerModel,
    rules: Rules,
    fill: float,
    holds: Callable[[Outcome], bool],
    note: Callable[[float], None],
) -> Found | None:
    """The cheapest schedule of a fill, with the highest yield of which one holds."""
    for share in YIELDS:
        plan, found, timely = _Plan(arrivals, model, rules, fill, share), [], True
        for level in range(plan.lowest, min(plan.lowest + LEVELS, rules.max) + 1):
            out = Simulation(arrivals, model, Schedule(plan.steps(level)), note, rules.min).run()
            timely = out.ended_at <= arrivals[-1].at + REST
            if not timely or not holds(out):
                break
            found.append(Found(out, fill, level))
        if found or timely:  # where the objective was missed, a lower yield does not help
            return min(found, key=lambda one: one.outcome.worker_s, default=None)
    return None


class _Plan:
    """Slots of a trace: workers that priority needs, and work that arrives (s of one worker)."""

    def __init__(
        self, arrivals: Sequence[Arrival], model: WorkerModel, rules: Rules, fill: float, share: float
    ) -> None:
        self._least = max(1, rules.min)
        self._lead = ceil(model.cold_start / SLOT)
        longest = max(model.work(one.prompt, one.output) for one in arrivals) * model.knee / model.tokens_per_s
        slots = ceil((arrivals[-1].at + max(SLOT, REST - 2 * longest)) / SLOT)
        self._last = int(arrivals[-1].at / SLOT)
        self._work = [0.0] * max(slots, self._last + 1)
        for one in arrivals:
            self._work[int(one.at / SLOT)] += model.work(one.prompt, one.output) / model.tokens_per_s / share
        room = fill * model.knee
        self._need = [
            min(rules.max, max(self._least, ceil(number / room)))
            for number in _in_flight(arrivals, model, len(self._work))
        ]
        self.lowest = next((level for level in range(1, rules.max) if self._done(level, 0) is not None), rules.max)
        """The lowest level that does all work by the end."""

    def _done(self, level: int, since: int) -> int | None:
        """The slot after which all is done, with at least `level` workers from slot `since` on; None if it is not."""
        left = 0.0
        for slot, number in enumerate(self._need):
            left = max(0.0, left + self._work[slot] - (max(number, level) if slot >= since else number) * SLOT)
            if slot >= self._last and not left:
                return slot
        return None

    def steps(self, level: int) -> list[tuple[float, int]]:
        """The schedule: numbers of workers, and when they are ordered."""
        since, late = 0, len(self._need)
        while late - since > 1:  # the latest slot from which on the level does all
            middle = (since + late) // 2
            since, late = (middle, late) if self._done(level, middle) is not None else (since, middle)
        end = self._done(level, since)
        end = len(self._need) if end is None else end + 1
        numbers = [max(number, level) if slot >= since else number for slot, number in enumerate(self._need[:end])]
        while numbers[-1] > self._least:
            numbers.append(max(self._least, numbers[-1] // 2))
        ahead = [max(numbers[slot : slot + self._lead + 1]) for slot in range(len(numbers))]
        return [(slot * SLOT, number) for slot, number in enumerate(ahead)]


def _in_flight(arrivals: Sequence[Arrival], model: WorkerModel, slots: int) -> list[int]:
    """The most priority sequences in flight in each slot, with room for all."""
    events: list[tuple[float, int]] = []
    for one in arrivals:
        if one.rank == 0:
            takes = model.work(one.prompt, one.output) * model.knee / model.tokens_per_s
            events += [(one.at, 1), (one.at + takes, -1)]
    events.sort()
    found, now, place = [0] * slots, 0, 0
    for slot in range(slots):
        most = now
        while place < len(events) and events[place][0] < (slot + 1) * SLOT:
            now += events[place][1]
            most, place = max(most, now), place + 1
        found[slot] = most
    return found
