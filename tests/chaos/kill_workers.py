"""Kill workers at random moments under load, while readers follow every stream.

    python -m tests.chaos.kill_workers --kills 50 --seed 1 --engine bundled

Real processes: a Valkey server, two workers, a producer with a mixed load, a reader for each stream. At seeded random
moments a worker is killed (SIGKILL) and a new one started; the next kill may come as soon as that one is up. In the end
the same tasks are run once more with no kills. Prints a summary, then a report as JSON (stdout); exits with 1 where a
task was lost, a stream has a hole or a token twice, a reader was given anything else than the stream, or an open stream
did not go on within the lease and 2 s.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from producers import End
from producers.events import decode, stream_position
from producers.protocol import MAX_DEATHS
from tests.chaos.fleet import ENGINES, Fleet, Kill
from tests.chaos.load import Followed, Load
from tests.chaos.streams import Stored
from tests.chaos.uninterrupted import Comparison, compare
from tests.processes import running_valkey

#: A stream that the killed worker was making must go on so soon after the lease's end (s).
MARGIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. `pause`: bounds of the time from when all workers are up to the next kill (s)."""

    kills: int
    seed: int
    engine: str
    lease: float = 10.0
    pause: tuple[float, float] = (0.0, 8.0)
    workers: int = 2
    open_tasks: int = 16
    longest: int = 400
    max_deaths: int = MAX_DEATHS
    deterministic: bool = False


@dataclass(slots=True)
class Findings:
    """`gaps`: for each kill, how long each stream that its worker was making stood still, s."""

    plan: Plan
    tasks: int = 0
    tokens: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    deaths: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
    takeovers: list[float] = field(default_factory=list)
    """Of all gaps, what came after the end of the dead worker's lease, s."""
    struck_again: int = 0
    """Streams that were killed once more before they went on; their time counts from the last kill."""
    visits: int = 0
    comparison: Comparison | None = None

    @property
    def late(self) -> list[float]:
        return [gap for gaps in self.gaps for gap in gaps if gap > self.plan.lease + MARGIN_S]

    @property
    def fine(self) -> bool:
        return not self.faults and not self.late

    def report(self) -> dict[str, Any]:
        all_gaps = sorted(gap for gaps in self.gaps for gap in gaps)
        return {
            "engine": self.plan.engine,
            "seed": self.plan.seed,
            "deterministic": self.plan.deterministic,
            "kills": len(self.gaps),
            "lease_s": self.plan.lease,
            "tasks": self.tasks,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "statuses": dict(self.statuses),
            "deaths": {str(deaths): count for deaths, count in sorted(self.deaths.items())},
            "readers_visits": self.visits,
            "faults": self.faults,
            "streams_stopped": len(all_gaps) + self.struck_again,
            "struck_again": self.struck_again,
            "gap_s": _quantiles(all_gaps),
            "takeover_s": _quantiles(sorted(self.takeovers)),
            "gap_max_by_kill_s": [round(max(gaps), 2) if gaps else None for gaps in self.gaps],
            "gaps_over_lease_and_margin": len(self.late),
            "uninterrupted": self.comparison.report() if self.comparison else None,
        }

    def summary(self) -> str:
        said = self.report()
        lines = [
            f"{said['kills']} kills of a worker in {said['seconds']} s, {said['tasks']} tasks, {said['tokens']} tokens",
            f"final states: {said['statuses']}; deaths counted per task: {said['deaths']}",
            f"open streams stopped: {said['streams_stopped']}; they stood still for {said['gap_s']} s "
            f"(lease {self.plan.lease} s + {MARGIN_S} s; {said['gaps_over_lease_and_margin']} longer), "
            f"of which {said['takeover_s']} s after the lease's end",
        ]
        if self.comparison is not None:
            lines.append(f"against an uninterrupted run: {self.comparison}")
        lines += [f"WRONG: {fault}" for fault in self.faults] or [
            "0 tasks lost, every stream whole, every reader right"
        ]
        return "\n".join(lines)


def run(plan: Plan, *, compared: bool = True) -> Findings:
    findings = Findings(plan)
    settings = ENGINES[plan.engine] | {"lease": plan.lease, "max_deaths": plan.max_deaths}
    if plan.deterministic:
        settings["engine"] = settings["engine"] | {"deterministic": True}
    with running_valkey() as server:
        url = f"redis://127.0.0.1:{server.port}/0"
        fleet = Fleet(url, **settings)
        load = Load(url, seed=plan.seed, model=settings["model"], open_tasks=plan.open_tasks, longest=plan.longest)
        try:
            fleet.start(plan.workers)
            started = time.monotonic()
            load.start()
            _kill(plan, fleet, load)
            load.stop()
            ended = load.wait(60 + 4 * plan.lease)
            findings.seconds = time.monotonic() - started
            if not ended:
                findings.faults.append("streams did not end: " + ", ".join(t.id for t in load.followed if not t.ended))
            if compared:
                findings.comparison = compare(url, plan.seed, settings["model"], plan.longest, load.followed)
        finally:
            stopped = fleet.stop()
        findings.faults += stopped + load.failures
        with Redis.from_url(url, decode_responses=True) as redis:
            _judge_tasks(findings, redis, load.followed)
            _judge_broker(findings, redis)
        _judge_gaps(findings, fleet.kills, {task.id: task for task in load.followed})
    return findings


def _kill(plan: Plan, fleet: Fleet, load: Load) -> None:
    rng = random.Random(plan.seed)
    while not any(task.received for task in load.followed):
        time.sleep(0.05)
    for number in range(plan.kills):
        # One at a time: while no worker is left at all, streams wait for one to start, which is not what is measured.
        while len(fleet.ready()) < plan.workers:
            time.sleep(0.05)
        time.sleep(rng.uniform(*plan.pause))
        kill = fleet.kill(rng.choice(fleet.workers), [task.id for task in load.followed if not task.ended])
        print(f"kill {number + 1}: {kill.worker}, making {len(kill.stopped)} streams", file=sys.stderr, flush=True)


def _judge_tasks(findings: Findings, store: Redis, followed: list[Followed]) -> None:
    for task in followed:
        stored = Stored.read(store, task.id)
        findings.tasks += 1
        findings.visits += task.visits
        findings.statuses[stored.record.status] += 1
        findings.deaths[stored.record.deaths] += 1
        findings.tokens += sum(map(len, stored.tokens))
        findings.faults += stored.faults(deaths=findings.plan.kills)
        if task.error is not None:
            findings.faults.append(f"the reader of task {task.id} failed: {task.error}")
        stands = [decode(stream_position(name), entry) for name, entry in stored.entries]
        given = [event for _, event in task.received]
        if given != stands:
            findings.faults.append(
                f"the reader of task {task.id} was given {len(given)} events of {len(stands)}: {given}"
            )
        if sum(isinstance(event, End) for event in given) != 1:
            findings.faults.append(f"the reader of task {task.id} was not told of one end")


def _judge_broker(findings: Findings, broker: Redis) -> None:
    kinds = ("penstock:queue:", "penstock:inflight:", "penstock:delayed:", "penstock:dead", "penstock:reaped")
    names = [str(name) for name in broker.keys("penstock:*")]
    findings.faults += [f"left on the broker: {name}" for name in names if name.startswith(kinds)]


def _judge_gaps(findings: Findings, kills: list[Kill], tasks: dict[str, Followed]) -> None:
    for number, kill in enumerate(kills):
        gaps = []
        for task_id, length in kill.stopped.items():
            later = [at for at, event in tasks[task_id].received if event.position >= length]
            again = [other.at for other in kills[number + 1 :] if other.stopped.get(task_id) == length]
            if again:
                findings.struck_again += 1
            elif later:
                gaps.append(later[0] - kill.at)
                findings.takeovers.append(gaps[-1] - kill.lease_left)
        findings.gaps.append(gaps)


def _quantiles(ordered: list[float]) -> dict[str, float | None]:
    last = len(ordered) - 1
    parts = (("p50", 0.5), ("p95", 0.95), ("max", 1.0))
    return {name: round(ordered[int(part * last)], 2) if ordered else None for name, part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=ENGINES, default="bundled")
    parser.add_argument("--lease", type=float, default=10.0, help="seconds (default: 10)")
    parser.add_argument("--max-deaths", type=int, default=MAX_DEATHS, help="as workers are told (default: theirs)")
    parser.add_argument(
        "--deterministic", action="store_true", help="in the engine's deterministic mode; with --engine bundled"
    )
    args = parser.parse_args()
    if args.deterministic and args.engine != "bundled":
        parser.error("--deterministic goes with --engine bundled: others compute nothing")
    plan = Plan(
        kills=args.kills,
        seed=args.seed,
        engine=args.engine,
        lease=args.lease,
        max_deaths=args.max_deaths,
        deterministic=args.deterministic,
    )
    findings = run(plan)
    print(findings.summary(), file=sys.stderr)
    print(json.dumps(findings.report(), indent=2))
    sys.exit(0 if findings.fine else 1)


if __name__ == "__main__":
    main()
