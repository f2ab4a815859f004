"""One run: a plan drawn for a stage, its trial (`workers.trials.chaos.trial`), everything down, and the verdict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.chaos import clock
from tests.chaos.stage import Shape, Stage
from workers.trials.chaos.checker.report import Report
from workers.trials.chaos.plan import KINDS, Plan, draw
from workers.trials.chaos.trial import Trial

#: All faults that a stage can suffer on this machine.
ALL_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind != "clock" or clock.available())
#: Those of processes: SQS's own are its proxy's. A link of a process leads to the store, which is the one server.
SQS_KINDS: tuple[str, ...] = ("kill", "pause", "drain", "refuse", "silence", "cut", "delay", "restart")
#: What is still open when the load ends may take so long (s): a submit that was left half done waits for the sweeper.
CALM_S = 90.0
#: The load goes on until so many tasks have ended, on a machine however busy.
SOME = 10


@dataclass(slots=True)
class Outcome:
    """`folder` has the plan, journals and logs of the run."""

    report: Report
    folder: Path

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
    kept = folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    stage = Stage(Shape(**plan.shape), plan.seed, folder, say)
    urls = stage.broker.url, stage.store.url
    trial = Trial(*urls, plan, folder, alone=True, least=SOME, calm=CALM_S, quiet=4 * CALM_S)
    try:
        stage.up()
        report = trial.run(stage, stage, command, say, stage.end)
    finally:
        stage.down()
    if report.fine and not kept:
        shutil.rmtree(folder)
    return Outcome(report, folder)
