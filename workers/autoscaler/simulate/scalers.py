"""Scalers to compare: the policy, KEDA's listLength with the HPA behind it, an HPA on CPU, and a given schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import ceil, inf
from typing import Final

from workers.autoscaler.policy.decide import Decision, Memory, decide
from workers.autoscaler.policy.rules import Rules
from workers.autoscaler.simulate.simulation import Simulation

#: Difference from the target within which an HPA changes nothing.
TOLERANCE: Final = 0.1
#: An HPA's interval, and how long the highest number holds before it scales in (s).
SYNC, STABILISATION = 15.0, 300.0


class Policy:
    """The autoscaler's own policy, asked as often as the autoscaler asks."""

    def __init__(self, rules: Rules, every: float = 1.0) -> None:
        self.rules, self.every = rules, every
        self._memory = Memory(wanted=rules.min)
        self.last: Decision | None = None

    def wanted(self, pool: Simulation) -> int:
        self.last, self._memory = decide(self.rules, pool.signals(), self._memory)
        return self.last.wanted


class Schedule:
    """A number of workers from each time on."""

    def __init__(self, steps: Sequence[tuple[float, int]], every: float = 10.0) -> None:
        self.every = every
        self._times, self._numbers = [at for at, _ in steps], [number for _, number in steps]

    def wanted(self, pool: Simulation) -> int:
        return self._numbers[max(0, bisect_right(self._times, pool.now) - 1)]


class Hpa:
    """A HorizontalPodAutoscaler with its default behaviour: at most the larger of +100 % and +4 pods each 15 s, in once
    the highest number of 300 s allows it."""

    every = SYNC

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = max(1, least), most
        self._asked: deque[tuple[float, int]] = deque()

    def step(self, pool: Simulation, needed: int) -> int:
        """The number now, for the number that the metric asks for."""
        self._asked.append((pool.now, needed))
        while self._asked[0][0] <= pool.now - STABILISATION:
            self._asked.popleft()
        up = pool.up
        if needed < up:
            needed = min(up, max(number for _, number in self._asked))
        return min(max(min(needed, max(2 * up, up + 4)), self.least), self.most)


class CpuHpa(Hpa):
    """An HPA on CPU. Utilisation is the share of the knee that runs, which flatters it: CPUs and GPUs look fully busy
    with one sequence."""

    def __init__(self, least: int, most: int, target: float = 0.7) -> None:
        super().__init__(least, most)
        self._target = target

    def wanted(self, pool: Simulation) -> int:
        takers, up = pool.takers, pool.up
        if not takers:
            return max(up, self.least)
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
        self, least: int, most: int, list_length: int = 5, polling: float = 30.0, cool_down: float = 300.0
    ) -> None:
        super().__init__(least, most)
        self._length, self._polling, self._cool_down, self._zero = list_length, polling, cool_down, least == 0
        self._active_at, self._polled_at = -inf, -inf

    def wanted(self, pool: Simulation) -> int:
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
