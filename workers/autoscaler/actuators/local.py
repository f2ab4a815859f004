"""The local actuator: workers as child processes of this one.

    scale ─▶ too few: a free slot, a program for it, a child that is kept running
          └▶ too many: those that do not serve yet, then `first`, then the last started: SIGTERM, and killed after the
             drain time; the slot is free when the process has ended

What happens when a process dies:

- this process: the kernel kills its workers (`workers.processes.guard`). Their leases lapse, and others take their
  tasks.
- a worker: its lease is ended for it (docs/how/worker.md), and it is started again after a growing pause. A death
  before it served counts as a failed start.
- a worker that is refused before it ever served: it would be refused again. It stays down until `scale` is called
  again, which the autoscaler decides.
- a worker that `penstock drain` told to drain, or drained for a spot notice: it stays down until the number
  changes.
- a worker that drains because the number fell: it is not started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import SplitResult, parse_qsl

from engine.execution.threads import threads_of_each
from workers.autoscaler.actuators import Actual, ActuatorError
from workers.errors import REFUSED
from workers.library import name_of
from workers.processes import PENSTOCK
from workers.processes.supervisor import HAND_BACK_S, STAYS_STOPPED, Child, Program, Warm, ended

log = logging.getLogger(__name__)

REFUSAL: Final = "it was refused and would be refused again; the next try is the autoscaler's"


def open_url(url: SplitResult, *, model: str, broker: str, store: str, here: int) -> Local:
    """`local`, or `local:?OPTION=VALUE&...` with options of `penstock worker`, such as max-num-seqs=8.

    `here`: the number of workers that share this machine's cores. The last of equal options on a command line wins.
    """
    options = ["--threads", str(threads_of_each(here))] if here > 1 else []
    options += [word for name, value in parse_qsl(url.query) for word in (f"--{name}", value)]
    model_name, process = name_of(model), f"{socket.gethostname()}.{os.getpid()}"

    def program(slot: int) -> Program:
        name = f"worker.{model_name}.{slot}"
        argv = [*PENSTOCK, "worker", "--model", model, *options, "--name", f"{process}.{name}"]
        return Program(name, argv, {"BROKER_URL": broker, "STORE_URL": store}, notifies=True)

    return Local(model_name, Slots(), program, lambda name, line: log.info("%s | %s", name, line))


class Slots:
    """Numbers from 1 for a model's workers on this machine, each for one worker at a time.

    `limit`: the last number, if slots are few, as GPUs are.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._used: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether no number is free."""
        return self._limit is not None and len(self._used) >= self._limit

    def take(self) -> int | None:
        """The lowest free number; None if all are taken."""
        number = next(k for k in range(1, len(self._used) + 2) if k not in self._used)
        if self._limit is not None and number > self._limit:
            return None
        self._used.add(number)
        return number

    def give_back(self, number: int) -> None:
        self._used.discard(number)


@dataclass(eq=False, slots=True)
class _Worker:
    slot: int
    child: Child
    name: str
    """As in its lease."""
    down: str = ""
    """The reason why it is not kept running; empty while it is."""
    draining: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Local:
    """Keeps a number of a model's workers running as children of this process.

    `program(place)` makes a worker's program; its lease's name is the last argument. `drain`: the workers' own drain
    time (s). `restart`: whether workers that die are started again; see `go_on`. `standby`: processes that may become
    workers.
    """

    model: str
    slots: Slots
    program: Callable[[int], Program]
    say: Callable[[str, str], None]
    drain: float = 30.0
    restart: bool = True
    standby: Warm | None = None
    _target: int = field(init=False, default=0)
    _workers: list[_Worker] = field(init=False, default_factory=list)
    _failed: tuple[str, deque[str]] | None = field(init=False, default=None)
    """The end of the last worker that died before it served, as text, and the last lines of its output."""
    _failures: int = field(init=False, default=0)

    @property
    def name(self) -> str:
        return f"local {self.model}"

    @property
    def children(self) -> list[Child]:
        """The children that were started, also those that drain."""
        return [worker.child for worker in self._workers]

    @property
    def waits_for_slot(self) -> bool:
        """Whether it was told a number of workers for which no slot is free."""
        return self._target > len(self._workers) and self.slots.full

    @property
    def stopped_by_others(self) -> bool:
        """Whether a worker is down because another process told it to stop."""
        return any(worker.down == STAYS_STOPPED for worker in self._workers)

    async def actual(self) -> Actual:
        up = [worker for worker in self._workers if worker.draining is None and not worker.down]
        standbys = int(self.standby is not None and self.standby.ready)
        return Actual(self._target, len(up), self._failing(), self._failures, standbys)

    async def scale(self, target: int, first: Sequence[str] = ()) -> None:
        """See `Actuator`. Raises ActuatorError where no worker can be started now."""
        changed, self._target = target != self._target, target
        kept = [worker for worker in self._workers if worker.draining is None]
        for worker in kept:
            if worker.down == REFUSAL or (worker.down and changed):
                self._forget(worker)
        kept = [worker for worker in kept if worker in self._workers]
        for worker in self._surplus(kept, len(kept) - target, first):
            worker.draining = asyncio.create_task(self._drain(worker), name=f"drain {worker.name}")
        for _ in range(target - len(kept)):
            await self._start()

    def go_on(self) -> None:
        """Keep workers running that die, from now on."""
        self.restart = True
        for child in self.children:
            child.restart = True

    def hasten(self) -> None:
        """Make all workers hand back their running tasks now."""
        for child in self.children:
            child.order(signal.SIGQUIT)

    async def kill(self) -> None:
        await asyncio.gather(*(child.stop(1.0, signal.SIGKILL) for child in self.children))

    async def aclose(self) -> None:
        """Drain all workers, and wait for their end."""
        await self.scale(0)
        # A second SIGTERM would hasten those that drain already.
        await asyncio.gather(*(worker.draining for worker in self._workers if worker.draining is not None))

    def _failing(self) -> str:
        if self._failed is None:
            return ""
        how, lines = self._failed
        return ": ".join([how, *list(lines)[-1:]])

    @staticmethod
    def _surplus(workers: list[_Worker], count: int, first: Sequence[str]) -> list[_Worker]:
        """`count` of these workers, in the order in which they should end."""
        rank = {name: index for index, name in enumerate(first)}
        latest = sorted(workers, key=lambda worker: -worker.slot)
        return sorted(latest, key=lambda worker: (worker.child.serves, rank.get(worker.name, len(rank))))[
            : max(0, count)
        ]

    async def _start(self) -> None:
        slot = self.slots.take()
        if slot is None:
            raise ActuatorError(f"no GPU is free for another worker of {self.model}")
        program = self.program(slot)
        child = Child(program, self.say, self.standby)
        worker = _Worker(slot, child, program.argv[-1])
        child.restart = self.restart
        child.give_up = lambda status, deaths: self._ended(worker, status)
        child.on_serve = self._served
        try:
            await child.start()
        except BaseException as error:  # also where the lead is lost meanwhile: then the process was killed
            self.slots.give_back(slot)
            if not isinstance(error, OSError):
                raise
            raise ActuatorError(f"cannot start {program.name}: {error.strerror or error}") from error
        self._workers.append(worker)

    def _served(self) -> None:
        self._failed, self._failures = None, 0

    def _ended(self, worker: _Worker, status: int) -> str | None:
        """Notes the end of a process that was not ordered. Returns the reason why it is not started again, or None."""
        refused = status == REFUSED and not worker.child.served
        if status != 0 and not worker.child.serves:
            self._failures += 1
            self._failed = f"{worker.child.program.name} {ended(status)}", worker.child.output
        if status != 0 and not refused:
            return None
        worker.down = STAYS_STOPPED if status == 0 else REFUSAL
        return worker.down

    async def _drain(self, worker: _Worker) -> None:
        await worker.child.stop(self.drain + HAND_BACK_S)
        self._forget(worker)

    def _forget(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self.slots.give_back(worker.slot)
