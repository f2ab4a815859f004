"""Scalers to compare: the policy, KEDA's listLength with the HPA behind it, an HPA on CPU, and a clairvoyant schedule.

`clairvoyant` searches for a schedule of few worker-hours, with all arrivals known ahead. It is held to the same worker,
cold start, fewest and most workers, and to the objective: a share of the priority tasks have their first token in time.
All other tasks need only end within an hour (the longest target wait) of the last arrival.

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

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from workers.autoscaler.policy import Decision, Memory, Rules, decide
from workers.trials.simulate.simulation import Outcome, Simulation, WorkerModel
from workers.trials.simulate.traces import Arrival

#: Difference from the target within which an HPA changes nothing.
TOLERANCE: Final = 0.1
#: An HPA's interval, and how long the highest number holds before it scales in (s).
SYNC, STABILISATION = 15.0, 300.0
#: Length (s) of a slot of the schedule.
SLOT: Final = 60.0
#: Time (s) after the last arrival by which all is done.
DEADLINE: Final = 3600.0
#: Fills of a worker with priority sequences, in knees, that are tried, from the cheapest.
FILLS: Final = (2.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4)
#: Fills in a row that make nothing cheaper, after which the search ends.
VAIN: Final = 2
#: Levels that are tried above the lowest.
LEVELS: Final = 4
#: Shares of a worker's throughput that a plan counts on, from the cheapest: paused tasks compute tokens again.
YIELDS: Final = (0.98, 0.95, 0.9)


class Policy:
    """The autoscaler's own policy, called as often as the autoscaler calls it."""

    def __init__(self, rules: Rules, every: float = 1.0) -> None:
        self.rules, self.every = rules, every
        self._memory = Memory(wanted=rules.min)
        self.last: Decision | None = None

    def target(self, pool: Simulation) -> int:
        self.last, self._memory = decide(self.rules, pool.signals(), self._memory)
        return self.last.target


class Schedule:
    """A number of workers from each time on."""

    def __init__(self, steps: Sequence[tuple[float, int]], every: float = 10.0) -> None:
        self.every = every
        self._times, self._numbers = [at for at, _ in steps], [number for _, number in steps]

    def target(self, pool: Simulation) -> int:
        return self._numbers[max(0, bisect_right(self._times, pool.now) - 1)]


class Hpa:
    """A HorizontalPodAutoscaler with its default behaviour: at most the larger of +100 % and +4 pods each 15 s, in once
    the highest number of 300 s allows it."""

    every = SYNC

    def __init__(self, minimum: int, maximum: int) -> None:
        self.minimum, self.maximum = max(1, minimum), maximum
        self._recommendations: deque[tuple[float, int]] = deque()

    def step(self, pool: Simulation, needed: int) -> int:
        """The number now, for the number that the metric asks for."""
        self._recommendations.append((pool.now, needed))
        while self._recommendations[0][0] <= pool.now - STABILISATION:
            self._recommendations.popleft()
        up = pool.up
        if needed < up:
            needed = min(up, max(number for _, number in self._recommendations))
        return min(max(min(needed, max(2 * up, up + 4)), self.minimum), self.maximum)


class CpuHpa(Hpa):
    """An HPA on CPU. Utilisation is the share of the knee that runs, which flatters it: CPUs and GPUs look fully busy
    with one sequence."""

    def __init__(self, minimum: int, maximum: int, target: float = 0.7) -> None:
        super().__init__(minimum, maximum)
        self._target = target

    def target(self, pool: Simulation) -> int:
        takers, up = pool.takers, pool.up
        if not takers:
            return max(up, self.minimum)
        used = sum(min(1.0, worker.running / pool.model.knee) for worker in takers)
        ratio = used / len(takers) / self._target
        if abs(ratio - 1) <= TOLERANCE:
            return self.step(pool, up)
        if ratio > 1:  # starting pods count as idle
            ratio = used / up / self._target
            return self.step(pool, ceil(ratio * up) if ratio > 1 + TOLERANCE else up)
        return self.step(pool, ceil(ratio * len(takers)))


class Keda(Hpa):
    """KEDA's scaler of Redis lists, as it comes: `listLength` waiting tasks a replica, tasks in flight unseen."""

    def __init__(
        self, minimum: int, maximum: int, list_length: int = 5, polling: float = 30.0, cool_down: float = 300.0
    ) -> None:
        super().__init__(minimum, maximum)
        self._length, self._polling, self._cool_down, self._zero = list_length, polling, cool_down, minimum == 0
        self._active_at, self._polled_at = -inf, -inf

    def target(self, pool: Simulation) -> int:
        self._poll(pool)
        idle = pool.now - self._active_at >= self._cool_down
        if self._zero and idle:
            return 0
        if not pool.up:
            return 1
        ratio = pool.queued / (self._length * pool.up)
        return self.step(pool, pool.up if abs(ratio - 1) <= TOLERANCE else ceil(pool.queued / self._length))

    def _poll(self, pool: Simulation) -> None:
        if pool.now - self._polled_at >= self._polling:
            self._polled_at = pool.now
            if pool.queued:
                self._active_at = pool.now


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule that holds the objective, and its outcome."""

    outcome: Outcome
    fill: float
    level: int


def clairvoyant(
    arrivals: Sequence[Arrival],
    model: WorkerModel,
    rules: Rules,
    holds: Callable[[Outcome], bool],
    note: Callable[[float], None] = lambda at: None,
) -> Candidate | None:
    """The cheapest schedule found; None if none holds.

    `holds`: whether an outcome meets the objective. `note` gets the simulations' progress.
    """
    best, vain = None, 0
    for fill in (fill for fill in FILLS if fill * model.knee <= model.slots):
        candidate = _cheapest(arrivals, model, rules, fill, holds, note)
        if candidate is not None and (best is None or candidate.outcome.worker_s < best.outcome.worker_s):
            best, vain = candidate, 0
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
) -> Candidate | None:
    """The cheapest schedule of a fill, with the highest yield of which one holds."""
    for share in YIELDS:
        plan, candidates, timely = _Plan(arrivals, model, rules, fill, share), [], True
        for level in range(plan.lowest, min(plan.lowest + LEVELS, rules.max) + 1):
            out = Simulation(arrivals, model, Schedule(plan.steps(level)), note, rules.min).run()
            timely = out.ended_at <= arrivals[-1].at + DEADLINE
            if not timely or not holds(out):
                break
            candidates.append(Candidate(out, fill, level))
        if candidates or timely:  # where the objective was missed, a lower yield does not help
            return min(candidates, key=lambda candidate: candidate.outcome.worker_s, default=None)
    return None


class _Plan:
    """Slots of a trace: workers that priority needs, and work that arrives (s of one worker)."""

    def __init__(
        self, arrivals: Sequence[Arrival], model: WorkerModel, rules: Rules, fill: float, share: float
    ) -> None:
        self._least = max(1, rules.min)
        self._lead = ceil(model.cold_start / SLOT)
        longest = (
            max(model.work(arrival.prompt, arrival.output) for arrival in arrivals) * model.knee / model.tokens_per_s
        )
        slots = ceil((arrivals[-1].at + max(SLOT, DEADLINE - 2 * longest)) / SLOT)
        self._last = int(arrivals[-1].at / SLOT)
        self._work = [0.0] * max(slots, self._last + 1)
        for arrival in arrivals:
            self._work[int(arrival.at / SLOT)] += (
                model.work(arrival.prompt, arrival.output) / model.tokens_per_s / share
            )
        room = fill * model.knee
        self._need = [
            min(rules.max, max(self._least, ceil(number / room)))
            for number in _in_flight(arrivals, model, len(self._work))
        ]
        self.lowest = next((level for level in range(1, rules.max) if self._done(level, 0) is not None), rules.max)
        """The lowest level that does all work by the end."""

    def _done(self, level: int, since: int) -> int | None:
        """The slot after which all is done, with at least `level` workers from slot `since` on; None if it is not."""
        backlog = 0.0
        for slot, number in enumerate(self._need):
            backlog = max(0.0, backlog + self._work[slot] - (max(number, level) if slot >= since else number) * SLOT)
            if slot >= self._last and not backlog:
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
    for arrival in arrivals:
        if arrival.rank == 0:
            takes = model.work(arrival.prompt, arrival.output) * model.knee / model.tokens_per_s
            events += [(arrival.at, 1), (arrival.at + takes, -1)]
    events.sort()
    peaks, now, index = [0] * slots, 0, 0
    for slot in range(slots):
        peak = now
        while index < len(events) and events[index][0] < (slot + 1) * SLOT:
            now += events[index][1]
            peak, index = max(peak, now), index + 1
        peaks[slot] = peak
    return peaks
