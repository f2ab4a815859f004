"""A model of one worker: continuous batching.

A worker generates `tokens_per_s / knee` tokens a second for each of its sequences, up to `knee` of them. More share
`tokens_per_s`. A token of a prompt costs `prompt_cost` tokens of the output. Prompts are computed one after another,
better tiers first. A worker takes a task of a tier while fewer than `slots` sequences of that tier and better ones are
there (the credit of FETCH). If its batch is full, the worst and youngest sequence pauses, and later computes its tokens
anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

from workers.autoscaler.simulate.trace import TIERS

RANKS: Final = range(len(TIERS))


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker's speed and sizes. Times are seconds."""

    knee: int = 16
    tokens_per_s: float = 320.0
    slots: int = 32
    prompt_cost: float = 0.05
    cold_start: float = 60.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        """Raises ValueError naming the setting that makes no sense."""
        if not 1 <= self.knee <= self.slots:
            raise ValueError(f"the knee is {self.knee} and the slots are {self.slots}; it must be 1 <= knee <= slots")
        if not 0 < self.tokens_per_s < float("inf"):
            raise ValueError(f"tokens_per_s is {self.tokens_per_s:g}; it must be above 0")
        for name in ("prompt_cost", "cold_start", "drain"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be 0 or more")

    def work(self, prompt: int, output: int) -> float:
        """A task's work, in tokens of output."""
        return prompt * self.prompt_cost + max(1, output)


class Task:
    """A task on its way. `left`: work that is still to do. `first`: time of its first token."""

    __slots__ = ("at", "ended", "first", "left", "output", "prompt", "rank", "total")

    def __init__(self, at: float, rank: int, prompt: int, output: int, work: float) -> None:
        self.at, self.rank, self.prompt, self.output = at, rank, prompt, output
        self.left = self.total = work
        self.first: float | None = None
        self.ended: float | None = None


class Worker:
    """One worker. Its sequences progress alike, so one number, `done`, tells the progress of all."""

    __slots__ = (
        "_ends", "_last", "_model", "_numbers", "_paused", "_prompts", "_ranks", "_running", "closes_at", "done",
        "held", "name", "ready", "ready_at", "started_at", "version",
    )  # fmt: skip

    def __init__(self, name: int, model: WorkerModel, now: float) -> None:
        self.name, self._model = name, model
        self.started_at, self.ready_at = now, now + model.cold_start
        self.ready = False
        self.closes_at: float | None = None
        """The end of its drain. None: it takes tasks."""
        self.held = [0] * len(TIERS)
        """Tasks that it holds, by rank."""
        self.done = 0.0
        """Work that a sequence would have got since the start."""
        self.version = 0
        """Changes with each change of the batch: an end that was foreseen before is none any more."""
        self._last = now
        self._ends: list[tuple[float, int, Task]] = []
        self._running: dict[int, tuple[float, Task]] = {}
        self._ranks: list[dict[int, None]] = [{} for _ in TIERS]  # the numbers that run, oldest first
        self._paused: list[tuple[int, int, Task]] = []
        self._prompts = [now] * len(TIERS)
        self._numbers = count()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def load(self) -> int:
        return len(self._running) + len(self._paused)

    def has_room(self, rank: int) -> bool:
        return sum(self.held[: rank + 1]) < self._model.slots

    def next_end(self) -> float | None:
        """When its next sequence ends, unless the batch changes."""
        while self._ends and self._ends[0][1] not in self._running:
            heappop(self._ends)
        return self._last + (self._ends[0][0] - self.done) / self._rate() if self._ends else None

    def _rate(self) -> float:
        """Work a second that each sequence gets."""
        running, knee = len(self._running), self._model.knee
        return self._model.tokens_per_s / (running if running > knee else knee)

    def advance(self, now: float) -> None:
        self.done += (now - self._last) * self._rate()
        self._last = now

    def take(self, task: Task, now: float) -> None:
        """Claim a task. Pause another one if the batch is full."""
        self.advance(now)
        self.held[task.rank] += 1
        if len(self._running) >= self._model.slots:
            self._pause_one()
        self._run(task)
        if task.first is None:
            task.first = self._compute_prompt(task, now) + 1 / self._rate()

    def _compute_prompt(self, task: Task, now: float) -> float:
        """When the prompt is computed. Worse tiers' prompts wait for it."""
        cost = task.prompt * self._model.prompt_cost / self._model.tokens_per_s
        for rank in RANKS[task.rank :]:
            self._prompts[rank] = max(self._prompts[rank], now) + cost
        return self._prompts[task.rank]

    def _run(self, task: Task) -> None:
        number = next(self._numbers)
        self._running[number] = (self.done + task.left, task)
        self._ranks[task.rank][number] = None
        heappush(self._ends, (self.done + task.left, number, task))
        self.version += 1

    def _pause_one(self) -> None:
        number = next(reversed(next(numbers for numbers in reversed(self._ranks) if numbers)))
        task = self._stop(number)
        heappush(self._paused, (task.rank, number, task))

    def _stop(self, number: int) -> Task:
        """Take a sequence out of the batch. It computes its prompt and tokens again when it goes on."""
        end, task = self._running.pop(number)
        del self._ranks[task.rank][number]
        made = task.total - (end - self.done)
        task.left = end - self.done + (task.prompt + max(0.0, made)) * self._model.prompt_cost
        return task

    def end_one(self, now: float) -> Task:
        """End the sequence that is done; a paused one goes on."""
        self.advance(now)
        self.next_end()
        _, number, task = heappop(self._ends)
        del self._running[number], self._ranks[task.rank][number]
        self.held[task.rank] -= 1
        task.ended = now
        if self._paused:
            self._run(heappop(self._paused)[2])
        self.version += 1
        return task

    def hand_back(self, now: float) -> list[Task]:
        """Give up all that it holds, best and oldest tasks first."""
        self.advance(now)
        given = [self._stop(number) for number in list(self._running)] + [task for *_, task in self._paused]
        self._paused, self._ends, self.held = [], [], [0] * len(TIERS)
        self.version += 1
        return sorted(given, key=lambda task: (task.rank, task.at))
