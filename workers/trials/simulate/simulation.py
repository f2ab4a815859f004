"""The simulation: arrivals, workers and a scaler, event by event.

A worker models continuous batching. It generates `tokens_per_s / knee` tokens a second for each of its sequences, up to
`knee` of them. More share `tokens_per_s`. A token of a prompt costs `prompt_cost` tokens of the output. Prompts are
computed one after another, better tiers first. A worker takes a task of a tier while fewer than `slots` sequences of
that tier and better ones are there (the credit of FETCH). If its batch is full, the worst and youngest sequence pauses,
and later computes its tokens again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final, Protocol

from producers.contract.profile import Profile
from workers.autoscaler.policy import LATENCY_TIERS, Signals, TierQueue
from workers.trials.simulate.traces import TIERS, Arrival

#: Interval (s) of the samples for plots.
SAMPLE: Final = 60.0
#: Time (s) of the TTFTs in the measured p95, and between two measurements of it.
RECENT, MEASURE = 300.0, 10.0
#: Tasks that ended last, over which the profile's tokens a task are a mean.
ENDED: Final = 2000
#: Longest time (s) after the last arrival; a scaler that leaves tasks so long never serves them.
LONGEST: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker's speed and sizes. Times are seconds."""

    knee: int = 16
    tokens_per_s: float = 320.0
    slots: int = 32
    prompt_cost: float = 0.05
    cold_start: float = 60.0
    drain: float = 30.0
    turn_share: float = 1.0
    """The part of the device's time that other models on it leave."""

    def __post_init__(self) -> None:
        """Raises ValueError, which names the bad setting."""
        if not 1 <= self.knee <= self.slots:
            raise ValueError(f"the knee is {self.knee} and the slots are {self.slots}; it must be 1 <= knee <= slots")
        if not 0 < self.tokens_per_s < float("inf"):
            raise ValueError(f"tokens_per_s is {self.tokens_per_s:g}; it must be above 0")
        if not 0 < self.turn_share <= 1:
            raise ValueError(f"turn_share is {self.turn_share:g}; it must be above 0 and at most 1")
        for name in ("prompt_cost", "cold_start", "drain"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name):g}; it must be 0 or more")

    def work(self, prompt: int, output: int) -> float:
        """A task's work, in tokens of output."""
        return prompt * self.prompt_cost + max(1, output)


class Task:
    """A task on its way. `remaining`: work that is still to do. `first`: time of its first token."""

    __slots__ = ("at", "ended", "first", "output", "prompt", "rank", "remaining", "total")

    def __init__(self, at: float, rank: int, prompt: int, output: int, work: float) -> None:
        self.at, self.rank, self.prompt, self.output = at, rank, prompt, output
        self.remaining = self.total = work
        self.first: float | None = None
        self.ended: float | None = None


class Worker:
    """One worker. Its sequences progress alike, so one number, `done`, is the progress of all."""

    __slots__ = (
        "_ends",
        "_last",
        "_model",
        "_numbers",
        "_paused",
        "_prompts",
        "_ranks",
        "_running",
        "claimed",
        "closes_at",
        "done",
        "name",
        "ready",
        "ready_at",
        "started_at",
        "version",
    )  # fmt: skip

    def __init__(self, name: int, model: WorkerModel, now: float) -> None:
        self.name, self._model = name, model
        self.started_at, self.ready_at = now, now + model.cold_start
        self.ready = False
        self.closes_at: float | None = None
        """The end of its drain. None: it takes tasks."""
        self.claimed = [0] * len(TIERS)
        """Tasks that it holds, by rank."""
        self.done = 0.0
        """Work that a sequence would have got since the start."""
        self.version = 0
        """Changes with each change of the batch: an end that was foreseen before is void."""
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
        return sum(self.claimed[: rank + 1]) < self._model.slots

    def next_end(self) -> float | None:
        """The time at which its next sequence ends, unless the batch changes."""
        while self._ends and self._ends[0][1] not in self._running:
            heappop(self._ends)
        return self._last + (self._ends[0][0] - self.done) / self._rate() if self._ends else None

    def _rate(self) -> float:
        """Work a second that each sequence gets."""
        running, knee = len(self._running), self._model.knee
        return self._model.tokens_per_s * self._model.turn_share / (running if running > knee else knee)

    def advance(self, now: float) -> None:
        self.done += (now - self._last) * self._rate()
        self._last = now

    def take(self, task: Task, now: float) -> None:
        """Claim a task. Pause another one if the batch is full."""
        self.advance(now)
        self.claimed[task.rank] += 1
        if len(self._running) >= self._model.slots:
            self._pause_one()
        self._run(task)
        if task.first is None:
            task.first = self._compute_prompt(task, now) + 1 / self._rate()

    def _compute_prompt(self, task: Task, now: float) -> float:
        """The time at which the prompt is computed. Worse tiers' prompts wait for it."""
        cost = task.prompt * self._model.prompt_cost / (self._model.tokens_per_s * self._model.turn_share)
        for rank in range(task.rank, len(TIERS)):
            self._prompts[rank] = max(self._prompts[rank], now) + cost
        return self._prompts[task.rank]

    def _run(self, task: Task) -> None:
        number = next(self._numbers)
        self._running[number] = (self.done + task.remaining, task)
        self._ranks[task.rank][number] = None
        heappush(self._ends, (self.done + task.remaining, number, task))
        self.version += 1

    def _pause_one(self) -> None:
        number = next(reversed(next(numbers for numbers in reversed(self._ranks) if numbers)))
        task = self._stop(number)
        heappush(self._paused, (task.rank, number, task))

    def _stop(self, number: int) -> Task:
        """Take a sequence out of the batch. It computes its prompt and tokens again when it goes on."""
        end, task = self._running.pop(number)
        del self._ranks[task.rank][number]
        computed = task.total - (end - self.done)
        task.remaining = end - self.done + (task.prompt + max(0.0, computed)) * self._model.prompt_cost
        return task

    def end_one(self, now: float) -> Task:
        """End the sequence that is done; a paused one goes on."""
        self.advance(now)
        self.next_end()
        _, number, task = heappop(self._ends)
        del self._running[number], self._ranks[task.rank][number]
        self.claimed[task.rank] -= 1
        task.ended = now
        if self._paused:
            self._run(heappop(self._paused)[2])
        self.version += 1
        return task

    def hand_back(self, now: float) -> list[Task]:
        """Give up all that it holds, best and oldest tasks first."""
        self.advance(now)
        tasks = [self._stop(number) for number in list(self._running)] + [task for *_, task in self._paused]
        self._paused, self._ends, self.claimed = [], [], [0] * len(TIERS)
        self.version += 1
        return sorted(tasks, key=lambda task: (task.rank, task.at))


class Scaler(Protocol):
    """Decides how many workers there should be. `every`: interval (s) at which it is called."""

    every: float

    def target(self, pool: Simulation) -> int: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one moment, for plots."""

    at: float
    hurried: int
    patient: int
    """Waiting tasks: of priority and default; of flex and batch."""
    ready: int
    up: int
    """Workers that take tasks; those that exist, with starting and draining ones."""
    worker_s: float


@dataclass(slots=True)
class Outcome:
    """The outcome of a trace. `worker_s`: time of all workers, from the order to start to the end of the drain."""

    tasks: list[Task]
    worker_s: float = 0.0
    ended_at: float = 0.0
    max_workers: int = 0
    """Most workers that existed at once."""
    turns: int = 0
    """Changes of the number's direction."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    handed_back: int = 0
    work_s: float = 0.0
    """Time that one worker at its knee would need for all tasks, with a device of its own."""


class Simulation:
    """A pool of workers under a trace. `run` once."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        model: WorkerModel,
        scaler: Scaler,
        note: Callable[[float], None] = lambda at: None,
        ready: int = 0,
    ) -> None:
        """`note` gets the time, once for each sample. `ready`: workers that are ready at the start."""
        self.model, self._scaler, self._note = model, scaler, note
        self.now = 0.0
        self.workers: list[Worker] = []
        self.queues: list[deque[Task]] = [deque() for _ in TIERS]
        self._tasks = [Task(*arrival, model.work(arrival.prompt, arrival.output)) for arrival in arrivals]
        self._out = Outcome(self._tasks)
        self._heap: list[tuple[float, int, int, int]] = []  # (time, sequence, worker's name, its version)
        self._by_name: dict[int, Worker] = {}
        self._pushed = 0
        self._unfinished = len(self._tasks)
        self._target = 0
        self._direction = 0
        self._spent = 0.0
        self._firsts: deque[tuple[float, float]] = deque()
        self._ttft: tuple[float, float | None] = (-inf, None)
        self._ended: deque[int] = deque(maxlen=ENDED)
        self._out.work_s = sum(task.total for task in self._tasks) / model.tokens_per_s
        tokens = sum(task.prompt + task.output for task in self._tasks)
        self._mean = tokens / len(self._tasks)
        self._speed = tokens / self._out.work_s
        self.set_target(ready)
        for worker in self.workers:
            worker.ready = True

    # ---- what a scaler sees ---------------------------------------------------------------------------------------

    @property
    def up(self) -> int:
        """Workers that start or take tasks."""
        return sum(worker.closes_at is None for worker in self.workers)

    @property
    def queued(self) -> int:
        return sum(map(len, self.queues))

    @property
    def takers(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.ready and worker.closes_at is None]

    def signals(self) -> Signals:
        """The signals, as the autoscaler reads them from the store, the broker and the leases."""
        takers = self.takers
        claimed = [worker.claimed for worker in self.workers]
        waiting = {
            tier: TierQueue(len(queue), self.now - queue[0].at if queue else None)
            for tier, queue in zip(TIERS, self.queues, strict=True)
        }
        return Signals(
            at=self.now,
            tiers=waiting,
            in_flight=sum(map(sum, claimed)),
            patient=sum(sum(counts[len(LATENCY_TIERS) :]) for counts in claimed),
            ready=len(takers),
            running=sum(worker.running for worker in takers),
            profile=self._profile(takers),
            turn_share=self.model.turn_share if takers else 1.0,
        )

    def _profile(self, takers: list[Worker]) -> Profile:
        busy = sum(worker.running > 0 for worker in takers) / len(takers) if takers else None
        return Profile(
            knee=self.model.knee,
            tokens_per_s=self._speed,
            tokens_per_task=sum(self._ended) / len(self._ended) if len(self._ended) >= 100 else self._mean,
            ttft_p95=self._ttft_p95(),
            duty=None if busy is None else busy * self.model.turn_share,
            cold_start={"total": self.model.cold_start},
        )

    def _ttft_p95(self) -> float | None:
        at, value = self._ttft
        if self.now - at >= MEASURE:
            while self._firsts and self._firsts[0][0] < self.now - RECENT:
                self._firsts.popleft()
            ordered = sorted(ttft for _, ttft in self._firsts)
            value = ordered[int(0.95 * (len(ordered) - 1))] if ordered else None
            self._ttft = self.now, value
        return value

    # ---- events -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Simulate until all tasks have ended and no worker is left that the scaler would end."""
        arriving, tick, sample = 0, 0.0, 0.0
        tasks, last = self._tasks, self._tasks[-1].at
        while self._unfinished or self.now < last:
            next_arrival = tasks[arriving].at if arriving < len(tasks) else inf
            next_event = self._heap[0][0] if self._heap else inf
            at = min(next_arrival, next_event, tick)
            if at > last + LONGEST:
                break
            self._spend(at)
            if at == next_event:
                self._event()
            elif at == next_arrival:
                self._arrive(tasks[arriving])
                arriving += 1
            else:
                if at >= sample:
                    self._sample()
                    sample += SAMPLE
                self.set_target(self._scaler.target(self))
                tick = at + self._scaler.every
        self._out.worker_s, self._out.ended_at = self._spent, self.now
        self._sample()
        return self._out

    def _spend(self, at: float) -> None:
        self._spent += (at - self.now) * len(self.workers)
        self.now = at

    def _arrive(self, task: Task) -> None:
        roomy = [worker for worker in self.takers if worker.has_room(task.rank)] if not self.queues[task.rank] else []
        if roomy:
            self._give(min(roomy, key=lambda worker: worker.load), task)
        else:
            self.queues[task.rank].append(task)

    def _give(self, worker: Worker, task: Task) -> None:
        fresh = task.first is None
        worker.take(task, self.now)
        if fresh and task.first is not None:
            self._firsts.append((self.now, task.first - self.now))
        self._foresee(worker)

    def _foresee(self, worker: Worker) -> None:
        end = worker.next_end()
        if end is not None:
            self._push(max(end, self.now), worker, worker.version)

    def _push(self, at: float, worker: Worker, version: int) -> None:
        self._pushed += 1
        heappush(self._heap, (at, self._pushed, worker.name, version))

    def _event(self) -> None:
        _, _, name, version = heappop(self._heap)
        worker = self._by_name.get(name)
        if worker is None:
            return
        if version < 0:
            self._turn(worker)
        elif version == worker.version:
            task = worker.end_one(self.now)
            self._unfinished -= 1
            self._ended.append(task.prompt + task.output)
            self._foresee(worker)
            self._settle(worker)

    def _turn(self, worker: Worker) -> None:
        """A start or a drain is over."""
        if worker.closes_at is None:
            worker.ready = True
            self._fetch(worker)
        elif self.now >= worker.closes_at:
            self._remove(worker)

    def _settle(self, worker: Worker) -> None:
        if worker.closes_at is None:
            self._fetch(worker)
        elif not worker.load:
            self._remove(worker)

    def _fetch(self, worker: Worker) -> None:
        for rank, queue in enumerate(self.queues):
            while queue and worker.has_room(rank):
                self._give(worker, queue.popleft())

    def _remove(self, worker: Worker) -> None:
        """End a worker. What it held goes back to the head of its queue, with its tokens."""
        back = worker.hand_back(self.now)
        self._out.handed_back += len(back)
        self.workers.remove(worker)
        del self._by_name[worker.name]
        for task in reversed(back):
            self.queues[task.rank].appendleft(task)
        for other in self.takers if back else ():
            self._fetch(other)

    # ---- scaling ----------------------------------------------------------------------------------------------

    def set_target(self, target: int) -> None:
        """Start workers, or end them: idle ones, then the least loaded, and last those that start."""
        if target != self._target:
            direction = 1 if target > self._target else -1
            self._out.turns += direction == -self._direction
            self._direction, self._target = direction, target
            self._out.changes.append((self.now, target))
        for _ in range(target - self.up):
            self._start()
        if self.up > target:
            open_ones = [worker for worker in self.workers if worker.closes_at is None]
            open_ones.sort(key=lambda worker: (not worker.ready, worker.load, -worker.started_at))
            for worker in open_ones[: len(open_ones) - target]:
                self._drain(worker)

    def _start(self) -> None:
        self._pushed += 1
        worker = Worker(self._pushed, self.model, self.now)
        self.workers.append(worker)
        self._by_name[worker.name] = worker
        self._push(worker.ready_at, worker, -1)
        self._out.max_workers = max(self._out.max_workers, len(self.workers))

    def _drain(self, worker: Worker) -> None:
        worker.closes_at = self.now + self.model.drain
        if not worker.load:
            self._remove(worker)
        else:
            self._push(worker.closes_at, worker, -1)

    def _sample(self) -> None:
        waiting = list(map(len, self.queues))
        first, later = sum(waiting[: len(LATENCY_TIERS)]), sum(waiting[len(LATENCY_TIERS) :])
        self._out.samples.append(Sample(self.now, first, later, len(self.takers), len(self.workers), self._spent))
        self._note(self.now)
