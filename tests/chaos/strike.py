"""One run: a worker with the scenario's tasks, one strike at one of its calls, a second worker to end it well."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from tests.chaos.calls import Call
from tests.chaos.scenario import ENV, Scenario
from tests.chaos.tap import Aim, Mode, Tap
from tests.processes import running_valkey
from tests.waiting import PATIENCE_S, within
from tests.warm import WarmWorker

#: Long, so that no lease lapses because the machine is busy: the run lets the dead worker's lapse itself.
LEASE_S = 60.0


@dataclass(slots=True)
class Outcome:
    """How a run went. `struck` is None where the aim never struck."""

    calls: list[Call]
    struck: tuple[Mode, Call] | None
    faults: list[str]
    seconds: float
    logs: list[str] = field(default_factory=list)
    """What the workers said, where there are faults."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Kinds of adjacent calls; the first call follows `start`."""
        kinds = ["start", *(call.kind for call in self.calls)]
        return list(itertools.pairwise(kinds))


class Lane:
    """A server of its own, on which runs follow each other; several lanes may run beside each other."""

    def __init__(self) -> None:
        with contextlib.ExitStack() as stack:
            self._port = stack.enter_context(running_valkey()).port
            self._scenario = Scenario(self._port)
            stack.callback(self._scenario.close)
            self._open = stack.pop_all()
        self._workers: list[WarmWorker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, aim: Aim, drained: bool = False) -> Outcome:
        """Everything that was wrong is in the outcome's faults. `drained`: the worker is told to stop in the midst."""
        started = time.monotonic()
        scenario, faults = self._scenario, []
        pid: Future[int] = Future()
        scenario.begin((lambda: os.kill(pid.result(), signal.SIGTERM)) if drained else None)
        tap = Tap(self._port, aim, lambda: os.kill(pid.result(), signal.SIGKILL), scenario.watch)
        try:
            # What is drained runs slowly: Celery's loop may sleep for a second before it heeds the signal.
            first = self._worker("first", tap.port, STUB_STEP_S="0.05" if drained else "0.002")
            pid.set_result(first.pid)
            faults += self._first(first, tap)
            if scenario.leases() or not scenario.done():
                faults += self._second(tap)
            faults += scenario.faults(kills=int(self._killed(tap)), links=_links(tap, scenario.ids["linked"]))
            logs = [worker.log.read_text() for worker in self._workers] if faults else []
            return Outcome(tap.calls, tap.struck, faults, time.monotonic() - started, logs)
        finally:
            tap.close()
            for worker in self._workers:
                worker.close()
            self._workers.clear()

    def _worker(self, name: str, port: int, **env: str) -> WarmWorker:
        url = f"redis://127.0.0.1:{port}"
        worker = WarmWorker(
            env=ENV | env, broker=f"{url}/0", store=f"{url}/1", name=name, lease=LEASE_S, retry_after=0.1, drain=0.0
        )
        self._workers.append(worker)
        return worker

    def _first(self, worker: WarmWorker, tap: Tap) -> list[str]:
        """Until it is done and stopped, or dead."""
        if not within(lambda: not worker.alive or self._scenario.done()):
            return ["the first worker hangs"]
        worker.terminate()
        code = worker.ended(PATIENCE_S)
        if self._killed(tap):
            return []
        if tap.struck is None and (code != 0 or self._scenario.leases()):
            return [f"the first worker exited with {code}, leaving {self._scenario.leases()}"]
        # One that began with a lost answer may give up: whoever started it will start another.
        return [] if code in (0, 1) else [f"the first worker exited with {code}"]

    def _second(self, tap: Tap) -> list[str]:
        """A healthy worker finds what the first one left, whose leases may lapse apart."""
        scenario, order = self._scenario, tap.struck[1].number % 3 if tap.struck else 0
        if order == 0:  # cancelled while its owner seems to live
            scenario.cancel()
            scenario.lapse(scenario.broker, "first")
            scenario.lapse(scenario.store, "first")
        elif order == 1:  # cancelled when it has none
            scenario.lapse(scenario.store, "first")
            scenario.cancel()
            scenario.lapse(scenario.broker, "first")
        else:  # returned to the queue while its owner seems to live
            scenario.lapse(scenario.broker, "first")
        worker = self._worker("second", self._port)
        if order == 2:
            within(lambda: scenario.refetched() or not worker.alive)
            scenario.cancel()
            scenario.lapse(scenario.store, "first")
        if not within(lambda: not worker.alive or self._only_second()):
            return ["the second worker hangs"]
        if not worker.alive:
            return [f"the second worker exited with {worker.ended(0)}"]
        worker.kill()
        worker.ended(PATIENCE_S)
        scenario.bury("second")
        return []

    def _only_second(self) -> bool:
        return self._scenario.done() and all(name.startswith("second.") for name in self._scenario.leases())

    @staticmethod
    def _killed(tap: Tap) -> bool:
        return tap.struck is not None and tap.struck[0] != "drop"


def _links(tap: Tap, task_id: str) -> range:
    """How often the link may have been sent: once, unless the strike fell between FINISH and SETTLE."""
    assert tap.failure is None
    if tap.struck is None:
        return range(1, 2)
    _, struck = tap.struck
    said = {call.kind: call.number for call in reversed(tap.calls) if call.names(task_id)}
    unsettled = said.get("FINISH", struck.number + 1) <= struck.number <= said.get("SETTLE", struck.number)
    return range(1, 3) if unsettled else range(1, 2)
