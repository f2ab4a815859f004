"""Times of tasks in a worker, by their sizes: an estimate of a task's end is made of these (`producers.admin.eta`).

    publisher: a task that has completed ─▶ TaskTimesMeter.take ─▶ TaskTimes in the worker's profile

Sums that forget: constant memory, a few microseconds for each task. What is forecast is compared with what comes, so
the profile says how wrong its figures were, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from producers.contract.profile import QUANTILES, TaskTimes

#: Tasks over which figures are averaged; over which the shares of outputs are kept.
MEMORY: Final = 64
SHARES: Final = 200
#: Tasks whose forecast is compared with what came, together.
BATCH: Final = 8
#: Tasks without which nothing is told.
MIN_TASKS: Final = 3 * BATCH


@dataclass(slots=True)
class _Average:
    """A mean of the last MEMORY values, or so."""

    value: float = 0.0
    count: int = 0

    def take(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, MEMORY)


class TaskTimesMeter:
    """Written by one thread; others read it, a task early or late."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=SHARES)
        self._times, self._squares, self._needs, self._running = _Average(), _Average(), _Average(), _Average()
        #: Averages of output², output * prompt, prompt², output * seconds and prompt * seconds.
        self._products = tuple(_Average() for _ in range(5))
        self._error, self._need_error = _Average(), _Average()
        self._batch = [0.0, 0.0, 0.0]

    def take(
        self, seconds: float, *, need: int, prompt: int, output: float, allowed: int, width: int, running: int
    ) -> None:
        """Enter a task that completed in its first start. `seconds`: from its claim; `need`: KV tokens; `output`:
        tokens of a choice, of which `allowed` might have come (0: it generates nothing); `width`: its choices;
        `running`: sequences that the engine computed together at its end."""
        need = max(need, 1)
        if self._times.count >= BATCH:
            forecast = self._seconds(prompt, output)
            if forecast > 0:
                self._error.take(min(1.0, abs(seconds / forecast - 1)) ** 2)
        slots = seconds * width
        self._compare(slots, need)
        self._times.take(slots)
        self._squares.take(slots * slots)
        self._needs.take(need)
        self._running.take(running)
        values = output * output, output * prompt, float(prompt * prompt), output * seconds, prompt * seconds
        for average, value in zip(self._products, values, strict=True):
            average.take(value)
        if allowed:
            self._shares.append(output / allowed)

    def _compare(self, slots: float, need: int) -> None:
        """Compare what the need of BATCH tasks forecast with what they took."""
        self._batch = [self._batch[0] + slots, self._batch[1] + need * self._per_need, self._batch[2] + 1]
        took, forecast, count = self._batch
        if count == BATCH:
            if forecast > 0:
                self._need_error.take(min(1.0, abs(took / forecast - 1)) ** 2)
            self._batch = [0.0, 0.0, 0.0]

    @property
    def _per_need(self) -> float:
        return self._times.value / self._needs.value if self._needs.value else 0.0

    def _line(self) -> tuple[float, float]:
        """Seconds of a token of the output, and of the prompt; neither is negative."""
        oo, op, pp, os, ps = (average.value for average in self._products)
        determinant = oo * pp - op * op
        if determinant > 1e-6 * oo * pp:
            output, prompt = (os * pp - ps * op) / determinant, (ps * oo - os * op) / determinant
            if output >= 0 and prompt >= 0:
                return output, prompt
            if prompt < 0:
                return os / oo, 0.0
            return 0.0, ps / pp
        return (os / oo, 0.0) if oo else (0.0, ps / pp if pp else 0.0)

    def _seconds(self, prompt: int, output: float) -> float:
        by_output, by_prompt = self._line()
        return by_output * output + by_prompt * prompt

    def times(self) -> TaskTimes | None:
        """The figures now; None before MIN_TASKS tasks."""
        if self._times.count < MIN_TASKS or not self._times.value:
            return None
        by_output, by_prompt = self._line()
        return TaskTimes(
            per_output_token=round(by_output, 7),
            per_prompt_token=round(by_prompt, 8),
            per_need=round(self._per_need, 8),
            task=round(self._times.value, 6),
            remaining=round(self._squares.value / self._times.value / 2, 6),
            need_error=round(self._need_error.value**0.5, 4),
            error=round(self._error.value**0.5, 4),
            running=round(self._running.value, 1),
            shares=quantiles(tuple(self._shares)),
        )


def quantiles(values: tuple[float, ...]) -> tuple[float, ...]:
    """The least value, each tenth and the largest, between neighbours by a straight line; none of none."""
    ordered = sorted(values)
    if not ordered:
        return ()
    places = [k * (len(ordered) - 1) / (QUANTILES - 1) for k in range(QUANTILES)]
    neighbours = [*pairwise(ordered), (ordered[-1], ordered[-1])]
    pairs = [neighbours[int(place)] for place in places]
    return tuple(round(low + place % 1 * (high - low), 5) for place, (low, high) in zip(places, pairs, strict=True))
