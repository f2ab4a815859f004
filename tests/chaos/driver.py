"""One run: a stage, a plan, a load; then quiet, the same tasks once more, everything down, and the verdict.

plan.json -> load -> faults -> calm (all healed, all read to the end) -> quiet -> idle -> down -> checker -> report
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from producers.connection.connect import connect
from tests.chaos import clock
from tests.chaos.processes import wait_for
from tests.chaos.stage import BOOT_S, HAND_BACK_S, SILENT_S, Shape, Stage
from workers.chaos.checker import Case, History, Report, Stores, Violation, Watcher, judge
from workers.chaos.checker.rest import workers_of
from workers.chaos.checker.store import wait_until_over
from workers.chaos.injector import Injector
from workers.chaos.load import LINKS
from workers.chaos.plan import KINDS, Plan, draw
from workers.chaos.pulse import Pulse

#: All faults that a stage can suffer on this machine.
ALL_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "clock" or clock.available())
#: Those of processes: SQS's own are its proxy's. A link of a process leads to the store, which is the one server.
SQS_KINDS: tuple[str, ...] = ("kill", "pause", "drain", "refuse", "silence", "cut", "delay", "restart")
#: What is still open when the load ends may take so long (s): a submit that was left half done waits for the sweeper.
CALM_S = 90.0
#: A lease that stands for so long (s) beyond its own time is a fault.
IDLE_S = 60.0
#: The load goes on until so many tasks have ended, on a machine however busy.
SOME = 10


@dataclass(slots=True)
class Outcome:
    """`folder` has the plan, journals and logs of the run."""

    report: Report
    folder: Path
    case: Case

    def say(self) -> str:
        wrong = "\n".join(f"  {violation}" for violation in self.report.violations[:40])
        replay = f"replay: python -m tests.chaos --replay {self.folder / 'plan.json'}"
        return f"{self.report.markdown()}\n{wrong}\nseed {self.report.seed}; {replay}\njournals and logs: {self.folder}"


def plan_of(
    seed: int,
    shape: Shape,
    *,
    seconds: float,
    kinds: Sequence[str],
    kills: int | None = None,
    pause: tuple[float, float] = (0.5, 8.0),
) -> Plan:
    """Drawn for a stage of that shape."""
    return draw(
        seed,
        seconds,
        lambda kind: {role: targets(shape).get(role, ()) for role in KINDS[kind].roles},
        kinds=kinds,
        lease=shape.lease,
        kills=kills,
        pause=pause,
        shape=asdict(shape),
    )


def targets(shape: Shape) -> dict[str, list[str]]:
    """Names on a stage of that shape, by role."""
    found = {
        "worker": [f"worker-{k}" for k in range(1, shape.workers + 1)],
        "gateway": [f"gateway-{k}" for k in range(1, shape.gateways + 1)],
        "client": [f"client-{k}" for k in range(1, shape.clients + 1)],
        "sweeper": ["sweeper"],
    }
    servers = ["broker", "store"][: shape.servers]
    links = [f"{one}>{server}" for names in found.values() for one in names for server in servers]
    links += [f"client-{k}>gateway-{(k - 1) % shape.gateways + 1}" for k in range(1, shape.clients + 1)]
    return {**found, **{server: [server] for server in servers}, "link": links, "queues": ["queues"]}


def run(
    plan: Plan, *, command: str, folder: Path | None = None, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Carry a plan out. Whatever is wrong stands in the outcome's report; a folder without faults is removed, unless it
    was given."""
    shape = Shape(**plan.shape)
    kept = folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    plan.write(folder / "plan.json")
    case, stage_faults = _play(plan, shape, folder, say)
    violations = judge(case) + stage_faults
    report = Report.of(case, violations, command=command, seed=plan.seed, lease=plan.lease)
    (folder / "report.json").write_text(json.dumps(report.json(), indent=1))
    if not violations and not kept:
        shutil.rmtree(folder)
    return Outcome(report, folder, case)


def _play(plan: Plan, shape: Shape, folder: Path, say: Callable[[str], None]) -> tuple[Case, list[Violation]]:
    stage, wrong = Stage(shape, plan.seed, folder), list[Violation]()

    def fault(about: str, what: Any) -> None:
        wrong.append(Violation("everything_ends", about, str(what)))

    try:
        stage.up()
        watcher = Watcher(connect(stage.store.url, timeout=SILENT_S, decode=True), stage.journals)
        watcher.start()
        stage.journal.write("phase", name="load")
        stage.start_clients()
        pulse = Pulse(stage.store.url, stage.journal)
        pulse.start()
        urls = stage.broker.url, stage.store.url
        Injector(stage, stage.journal, *urls, lambda: list(watcher.open), pulse).run(plan, say)
        wait_for(lambda: len(watcher.streams) >= SOME, CALM_S)
        stage.journal.write("phase", name="calm")
        if stage.sqs is not None:
            say(f"SQS: {stage.sqs.calm()}")
        broker, store = stage.redis["broker"], stage.redis["store"]
        for name in stage.stop("client", CALM_S):
            fault(name, "did not read all its tasks to their ends")
        if left := wait_until_over(broker, store, CALM_S):
            fault("tasks and messages", f"were not done with after {CALM_S:g} s: {left[:20]}")
        pulse.stop()
        say("quiet: the same tasks once more")
        before = History.read(stage.journals)
        variants = sorted({seen.variant for seen in before.tasks.values()})
        stage.journal.write("phase", name="quiet")
        wait_for(lambda: all(slot.ready for slot in stage.slots.values() if slot.running), BOOT_S)
        if not stage.run_quietly(variants, CALM_S * 4):
            fault("the run in quiet", "did not come to its end")
        if left := wait_until_over(broker, store, CALM_S):
            fault("tasks and messages", f"of the run in quiet were not done with: {left[:20]}")
        watcher.stop()  # not before: a quiet run that takes longer than a minute is compacted while it goes on
        stores = Stores.read(broker, store, links=LINKS)
        if stage.sqs is not None:
            stores.left += stage.sqs.left()
        for role in ("worker", "gateway", "sweeper"):
            for name in stage.stop(role, shape.drain + HAND_BACK_S):
                fault(name, f"did not stop within its drain time and {HAND_BACK_S:g} s")
        # One that could not hand back in time leaves both, and the lease lapses.
        wait_for(lambda: not workers_of(broker), shape.lease + IDLE_S)
        stores.left += [f"{about['incarnation']}: a lease" for about in workers_of(broker)]
        clean = tuple(f"{slot.process}." for slot in stage.slots.values() if slot.role == "worker" and slot.code == 0)
        books = [name for name in map(str, broker.hkeys("penstock:incarnations")) if name.startswith(clean)]
        # One whose lease lapsed while its process lived on is left to whoever reaps next.
        said = "".join(log.read_text() for log in stage.logs.glob("worker-*.log"))
        stores.left += [f"an incarnation: {name}" for name in books if f"The lease of {name} lapsed" not in said]
    finally:
        stage.down()
    billed = watcher.billed(stores.ledger)
    return Case.of(History.read(stage.journals), stores, watcher.streams, ledger=billed), wrong
