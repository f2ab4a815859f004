"""A trial of a system: its clients' load, the faults, the same tasks without faults, and the judgement.

plan.json -> clients -> injector -> calm: all read to their ends -> quiet: the same tasks once more -> checker -> report
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from redis import Redis

from producers.connection.connect import connect
from workers.processes import guarded
from workers.trials.chaos.checker.case import Case, History, Journal, Violation, journal_path
from workers.trials.chaos.checker.report import Report
from workers.trials.chaos.checker.rules import judge
from workers.trials.chaos.checker.store import Stores, Watcher, letters_of, wait_until_over
from workers.trials.chaos.client import SETTINGS, Settings
from workers.trials.chaos.injector import Injector, Pulse, Scene
from workers.trials.chaos.load import LINKS
from workers.trials.chaos.plan import Plan

#: Time limits (s): for tasks open at the load's end, and for the run without faults.
CALM_S: Final = 180.0
QUIET_S: Final = 900.0


class Clients(Protocol):
    """The processes that submit and read a system's tasks."""

    def start_clients(self) -> None:
        """Begin the load. Returns when the processes handle signals."""

    def end_clients(self, seconds: float) -> list[Violation]:
        """Submit no more, and read what is open to its end. Returns who did not within `seconds`."""

    def run_quietly(self, variants: Sequence[int], seconds: float) -> list[Violation]:
        """Run each variant once. Returns what did not end within `seconds`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of a trial.

    `books`, `store`: the URLs of the servers that hold the broker's books and the store. `alone`: nobody else uses the
    system, so leftover keys and idle workers' memory are judged, too. `folder` gets the plan, the journals and the
    report. `least`: the load goes on until so many tasks have ended. `calm`, `quiet`: time limits (s).
    """

    books: str
    store: str
    plan: Plan
    folder: Path
    alone: bool = False
    least: int = 0
    calm: float = CALM_S
    quiet: float = QUIET_S

    def run(
        self,
        scene: Scene,
        clients: Clients,
        command: str,
        say: Callable[[str], None],
        last: Callable[[Redis, Stores], list[Violation]] = lambda broker, stores: [],
    ) -> Report:
        """Run the trial and return its report. Raises redis errors if a server is away at its begin or end.

        `last`: looks at what is left of the system once the stores are read.
        """
        self.plan.write(self.folder / "plan.json")
        self.journals.mkdir(exist_ok=True)
        with (
            connect(self.books, decode=True) as broker,
            connect(self.store, decode=True) as store,
            connect(self.store, timeout=2, decode=True) as watched,
        ):
            broker.delete(LINKS)
            old = letters_of(broker)
            watcher = Watcher(watched, self.journals)
            wrong = self._under_faults(scene, clients, watcher, lambda: self._over(broker, store), say)
            stores = Stores.read(broker, store, links=LINKS, only=self._ids())
            stores.dead = [letter for letter in stores.dead if letter not in old]
            broker.delete(LINKS)
            wrong += last(broker, stores)
        return self._judged(stores, watcher, wrong, command)

    @property
    def journals(self) -> Path:
        return self.folder / "journals"

    def _ids(self) -> list[str] | None:
        """The tasks to look at; None: all that there are."""
        return None if self.alone else list(History.read(self.journals).by_id)

    def _under_faults(
        self,
        scene: Scene,
        clients: Clients,
        watcher: Watcher,
        over: Callable[[], list[Violation]],
        say: Callable[[str], None],
    ) -> list[Violation]:
        """The load with the faults, and once more without. Returns what did not end."""
        journal = Journal(self.journals, "trial")
        pulse = Pulse(self.store, journal)
        with ExitStack() as ends:
            # The watcher's end comes after the run without faults: a long one is compacted while it goes on.
            for end in (journal.close, pulse.stop, watcher.stop):
                ends.callback(end)
            watcher.start()
            pulse.start()
            clients.start_clients()
            journal.write("phase", name="load")
            injector = Injector(scene, journal, self.books, self.store, lambda: list(watcher.open), pulse)
            injector.run(self.plan, say)
            deadline = time.monotonic() + self.calm
            while len(watcher.streams) < self.least and time.monotonic() < deadline:
                time.sleep(0.05)
            journal.write("phase", name="calm")
            say("calm: open tasks are read to their ends")
            wrong = [*clients.end_clients(self.calm), *over()]
            say("quiet: the same tasks once more, without faults")
            journal.write("phase", name="quiet")
            variants = sorted({observed.variant for observed in History.read(self.journals).tasks.values()})
            return [*wrong, *clients.run_quietly(variants, self.quiet), *over()]

    def _over(self, broker: Redis, store: Redis) -> list[Violation]:
        remaining = wait_until_over(broker, store, self.calm, self._ids(), shared=not self.alone)
        return [unended("tasks", f"were not done with: {remaining[:20]}")] if remaining else []

    def _judged(self, stores: Stores, watcher: Watcher, wrong: list[Violation], command: str) -> Report:
        history, ledger = History.read(self.journals), watcher.billed(stores.ledger)
        case = Case.of(history, stores, watcher.streams, shared=not self.alone, ledger=ledger)
        report = Report.of(case, judge(case) + wrong, command=command, seed=self.plan.seed, lease=self.plan.lease)
        (self.folder / "report.json").write_text(json.dumps(report.json(), indent=1))
        return report


def unended(subject: str, description: str) -> Violation:
    return Violation("everything_ends", subject, description)


@dataclass(slots=True)
class OneClient:
    """`Clients` of an operator's system: one process, killed at the end of the context, and with this process."""

    settings: Settings
    folder: Path
    _ends: ExitStack = field(init=False, default_factory=ExitStack)
    _process: subprocess.Popen[bytes] = field(init=False)

    def start_clients(self) -> None:
        self._process = self._start(self.settings)
        journal = journal_path(Path(self.settings.folder), self.settings.name, 1)
        while not journal.exists() and self._process.poll() is None:
            time.sleep(0.05)

    def end_clients(self, seconds: float) -> list[Violation]:
        self._process.send_signal(signal.SIGTERM)
        return _ended(self._process, self.settings.name, seconds)

    def run_quietly(self, variants: Sequence[int], seconds: float) -> list[Violation]:
        process = self._start(replace(self.settings, name="quiet", variants=tuple(variants)))
        return _ended(process, "the run in quiet", seconds)

    def _start(self, settings: Settings) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-P", "-m", "workers.trials.chaos.client"]
        env = {**os.environ, SETTINGS: settings.text()}
        with (self.folder / f"{settings.name}.log").open("wb") as log:
            process = subprocess.Popen(guarded(argv), stdout=log, stderr=subprocess.STDOUT, env=env)
        self._ends.callback(process.kill)
        return process

    def close(self) -> None:
        self._ends.close()


def _ended(process: subprocess.Popen[bytes], name: str, seconds: float) -> list[Violation]:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return [unended(name, f"did not read all its tasks to their ends within {seconds:g} s")]
    return [unended(name, f"failed: {status}")] if status else []
