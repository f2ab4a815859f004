"""The simulation: arrivals, workers and a scaler, event by event."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final, Protocol

from producers.contract.profile import Profile
from workers.autoscaler.policy.rules import HURRIED
from workers.autoscaler.policy.signals import Signals, TierQueue
from workers.autoscaler.simulate.trace import TIERS, Arrival
from workers.autoscaler.simulate.worker import Task, Worker, WorkerModel

#: Interval (s) of the samples for plots.
SAMPLE: Final = 60.0
#: Time (s) of the TTFTs in the measured p95, and between two measurements of it.
RECENT, MEASURE = 300.0, 10.0
#: Tasks that ended last, over which the profile's tokens a task are a mean.
ENDED: Final = 2000
#: Longest time (s) after the last arrival; a scaler that leaves tasks so long never serves them.
LONGEST: Final = 86_400.0


class Scaler(Protocol):
    """Says how many workers there should be. `every`: interval (s) at which it is asked."""

    every: float

    def wanted(self, pool: Simulation) -> int: ...


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
    most: int = 0
    """Most workers that existed at once."""
    turns: int = 0
    """Changes of the number's direction."""
    changes: list[tuple[float, int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    handed_back: int = 0
    work_s: float = 0.0
    """Time that one worker at its knee would need for all tasks."""


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
        """`note` is told the time, once for each sample. `ready`: workers that are ready at the start."""
        self.model, self._scaler, self._note = model, scaler, note
        self.now = 0.0
        self.workers: list[Worker] = []
        self.queues: list[deque[Task]] = [deque() for _ in TIERS]
        self._tasks = [Task(*one, model.work(one.prompt, one.output)) for one in arrivals]
        self._out = Outcome(self._tasks)
        self._heap: list[tuple[float, int, int, int]] = []  # (time, sequence, worker's name, its version)
        self._by_name: dict[int, Worker] = {}
        self._pushed = 0
        self._left = len(self._tasks)
        self._wanted = 0
        self._direction = 0
        self._spent = 0.0
        self._firsts: deque[tuple[float, float]] = deque()
        self._ttft: tuple[float, float | None] = (-inf, None)
        self._ended: deque[int] = deque(maxlen=ENDED)
        self._out.work_s = sum(task.total for task in self._tasks) / model.tokens_per_s
        tokens = sum(task.prompt + task.output for task in self._tasks)
        self._mean = tokens / len(self._tasks)
        self._speed = tokens / self._out.work_s
        self.set_wanted(ready)
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
        """As the autoscaler reads them from the store, the broker and the leases."""
        takers = self.takers
        held = [worker.held for worker in self.workers]
        waiting = {
            tier: TierQueue(len(queue), self.now - queue[0].at if queue else None)
            for tier, queue in zip(TIERS, self.queues, strict=True)
        }
        return Signals(
            at=self.now,
            tiers=waiting,
            in_flight=sum(map(sum, held)),
            patient=sum(sum(one[len(HURRIED) :]) for one in held),
            ready=len(takers),
            running=sum(worker.running for worker in takers),
            profile=self._profile(takers),
        )

    def _profile(self, takers: list[Worker]) -> Profile:
        busy = sum(worker.running > 0 for worker in takers) / len(takers) if takers else None
        return Profile(
            knee=self.model.knee,
            tokens_per_s=self._speed,
            tokens_per_task=sum(self._ended) / len(self._ended) if len(self._ended) >= 100 else self._mean,
            ttft_p95=self._ttft_p95(),
            duty=busy,
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
        while self._left or self.now < last:
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
                self.set_wanted(self._scaler.wanted(self))
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
            self._left -= 1
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

    def set_wanted(self, wanted: int) -> None:
        """Start workers, or end them: idle ones, then the least loaded, and last those that start."""
        if wanted != self._wanted:
            direction = 1 if wanted > self._wanted else -1
            self._out.turns += direction == -self._direction
            self._direction, self._wanted = direction, wanted
            self._out.changes.append((self.now, wanted))
        for _ in range(wanted - self.up):
            self._start()
        if self.up > wanted:
            open_ones = [worker for worker in self.workers if worker.closes_at is None]
            open_ones.sort(key=lambda worker: (not worker.ready, worker.load, -worker.started_at))
            for worker in open_ones[: len(open_ones) - wanted]:
                self._drain(worker)

    def _start(self) -> None:
        self._pushed += 1
        worker = Worker(self._pushed, self.model, self.now)
        self.workers.append(worker)
        self._by_name[worker.name] = worker
        self._push(worker.ready_at, worker, -1)
        self._out.most = max(self._out.most, len(self.workers))

    def _drain(self, worker: Worker) -> None:
        worker.closes_at = self.now + self.model.drain
        if not worker.load:
            self._remove(worker)
        else:
            self._push(worker.closes_at, worker, -1)

    def _sample(self) -> None:
        hurried, patient = (sum(map(len, self.queues[: len(HURRIED)])), sum(map(len, self.queues[len(HURRIED) :])))
        self._out.samples.append(Sample(self.now, hurried, patient, len(self.takers), len(self.workers), self._spent))
        self._note(self.now)
