"""A trial of an operator's system: runs the load here, injects the faults there, and judges what is visible from here.

plan.json -> client process -> injector -> quiet: the same tasks without faults -> checker -> report
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from redis import Redis

from producers.broker.connect import control_url
from producers.connection.connect import connect
from workers.chaos.checker import Case, History, Report, Stores, Violation, Watcher, judge
from workers.chaos.checker.store import letters_of, wait_until_over
from workers.chaos.client import Settings
from workers.chaos.injector import Injector
from workers.chaos.journal import Journal, journal_path
from workers.chaos.load import LINKS, Load
from workers.chaos.operated import Operated
from workers.chaos.plan import Plan
from workers.chaos.pulse import Pulse

#: Time limits (s): for tasks open at the load's end, and for the run without faults.
CALM_S: Final = 180.0
QUIET_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of a trial.

    `alone`: nobody else uses the system, so leftover keys and idle workers' memory are judged, too. `folder` gets the
    plan, the journals and the report.
    """

    url: str
    broker: str
    store: str
    load: Load
    plan: Plan
    folder: Path
    open_tasks: int = 8
    alone: bool = False

    def run(self, system: Operated, command: str, say: Callable[[str], None]) -> Report:
        """Run the trial and return its report. Raises redis errors if a server is away at its begin or end."""
        self.plan.write(self.folder / "plan.json")
        self._journals.mkdir()
        books = control_url(self.broker, self.store)  # what the broker itself does not hold: leases, dead letters
        with (
            connect(books, decode=True) as broker,
            connect(self.store, decode=True) as store,
            connect(self.store, timeout=2, decode=True) as watched,
        ):
            broker.delete(LINKS)
            old = letters_of(broker)
            watcher = Watcher(watched, self._journals)
            wrong = self._under_faults(system, books, watcher, lambda: self._over(broker, store), say)
            stores = Stores.read(broker, store, links=LINKS, only=self._ids())
            stores.dead = [letter for letter in stores.dead if letter not in old]
            broker.delete(LINKS)
        return self._judged(stores, watcher, wrong, command)

    @property
    def _journals(self) -> Path:
        return self.folder / "journals"

    def _ids(self) -> list[str] | None:
        """The tasks to look at; None: all that there are."""
        return None if self.alone else list(History.read(self._journals).by_id)

    def _under_faults(
        self,
        system: Operated,
        books: str,
        watcher: Watcher,
        over: Callable[[], list[Violation]],
        say: Callable[[str], None],
    ) -> list[Violation]:
        """The load with the faults, and once more without. Returns what did not end."""
        journal = Journal(self._journals, "trial")
        pulse = Pulse(self.store, journal)
        settings = Settings(
            *("client", str(self._journals), self.url, self.broker, self.store, self.load), open_tasks=self.open_tasks
        )
        with ExitStack() as ends:
            for end in (journal.close, pulse.stop, watcher.stop):
                ends.callback(end)
            watcher.start()
            pulse.start()
            client = self._start(settings, ends)
            while not journal_path(self._journals, "client", 1).exists() and client.poll() is None:
                time.sleep(0.05)  # it does not handle signals yet
            journal.write("phase", name="load")
            injector = Injector(system, journal, books, self.store, lambda: list(watcher.open), pulse)
            injector.run(self.plan, say)
            journal.write("phase", name="calm")
            say("calm: open tasks are read to their ends")
            client.send_signal(signal.SIGTERM)
            wrong = [*_ended(client, "client", CALM_S), *over()]
            say("quiet: the same tasks once more, without faults")
            journal.write("phase", name="quiet")
            variants = sorted({seen.variant for seen in History.read(self._journals).tasks.values()})
            quiet = self._start(replace(settings, name="quiet", variants=tuple(variants)), ends)
            return [*wrong, *_ended(quiet, "the run in quiet", QUIET_S), *over()]

    def _over(self, broker: Redis, store: Redis) -> list[Violation]:
        left = wait_until_over(broker, store, CALM_S, self._ids(), shared=not self.alone)
        return [Violation("everything_ends", "tasks", f"were not done with: {left[:20]}")] if left else []

    def _judged(self, stores: Stores, watcher: Watcher, wrong: list[Violation], command: str) -> Report:
        history, ledger = History.read(self._journals), watcher.billed(stores.ledger)
        case = Case.of(history, stores, watcher.streams, shared=not self.alone, ledger=ledger)
        report = Report.of(case, judge(case) + wrong, command=command, seed=self.plan.seed, lease=self.plan.lease)
        (self.folder / "report.json").write_text(json.dumps(report.json(), indent=1))
        return report

    def _start(self, settings: Settings, ends: ExitStack) -> subprocess.Popen[bytes]:
        """A client process, which is killed at the end."""
        argv = [sys.executable, "-P", "-m", "workers.chaos.client", settings.text()]
        with (self.folder / f"{settings.name}.log").open("wb") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        ends.callback(process.kill)
        return process


def _ended(process: subprocess.Popen[bytes], name: str, seconds: float) -> list[Violation]:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return [Violation("everything_ends", name, f"did not read all its tasks to their ends within {seconds:g} s")]
    return [Violation("everything_ends", name, f"failed: {status}")] if status else []
