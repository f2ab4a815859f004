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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

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
        journals = self.folder / "journals"
        journals.mkdir()
        journal, wrong = Journal(journals, "trial"), list[Violation]()
        books = control_url(self.broker, self.store)  # what the broker itself does not hold: leases, dead letters
        with (
            connect(books, decode=True) as broker,
            connect(self.store, decode=True) as store,
            connect(self.store, timeout=2, decode=True) as watched,
        ):
            broker.delete(LINKS)
            old = letters_of(broker)
            watcher = Watcher(watched, journals)
            watcher.start()
            pulse = Pulse(self.store, journal)
            pulse.start()
            settings = Settings(
                "client", str(journals), self.url, self.broker, self.store, self.load, open_tasks=self.open_tasks
            )
            client = self._start(settings, "client")
            begun = [client]
            try:
                while not journal_path(journals, "client", 1).exists() and client.poll() is None:
                    time.sleep(0.05)  # it does not handle signals yet
                journal.write("phase", name="load")
                injector = Injector(system, journal, books, self.store, lambda: list(watcher.open), pulse)
                injector.run(self.plan, say)
                journal.write("phase", name="calm")
                say("calm: open tasks are read to their ends")
                client.send_signal(signal.SIGTERM)
                wrong += _ended(client, "client", CALM_S)
                ids = None if self.alone else list(History.read(journals).by_id)
                wrong += _over(wait_until_over(broker, store, CALM_S, ids, shared=not self.alone))
                say("quiet: the same tasks once more, without faults")
                journal.write("phase", name="quiet")
                variants = sorted({seen.variant for seen in History.read(journals).tasks.values()})
                quiet = self._start(replace(settings, name="quiet", variants=tuple(variants)), "quiet")
                begun.append(quiet)
                wrong += _ended(quiet, "the run in quiet", QUIET_S)
                ids = None if self.alone else list(History.read(journals).by_id)
                wrong += _over(wait_until_over(broker, store, CALM_S, ids, shared=not self.alone))
            finally:
                for process in begun:
                    process.kill()
                watcher.stop()
                pulse.stop()
                journal.close()
            stores = Stores.read(broker, store, links=LINKS, only=ids)
            stores.dead = [letter for letter in stores.dead if letter not in old]
            broker.delete(LINKS)
        case = Case.of(
            History.read(journals),
            stores,
            watcher.streams,
            shared=not self.alone,
            ledger=watcher.billed(stores.ledger),
        )
        report = Report.of(case, judge(case) + wrong, command=command, seed=self.plan.seed, lease=self.plan.lease)
        (self.folder / "report.json").write_text(json.dumps(report.json(), indent=1))
        return report

    def _start(self, settings: Settings, name: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-P", "-m", "workers.chaos.client", settings.text()]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)


def _ended(process: subprocess.Popen[bytes], name: str, seconds: float) -> list[Violation]:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return [Violation("everything_ends", name, f"did not read all its tasks to their ends within {seconds:g} s")]
    return [Violation("everything_ends", name, f"failed: {status}")] if status else []


def _over(left: list[str]) -> list[Violation]:
    return [Violation("everything_ends", "tasks", f"were not done with: {left[:20]}")] if left else []
