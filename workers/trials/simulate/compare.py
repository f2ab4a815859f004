"""The policy and what it is compared with, on one trace: TTFT by tier, worker-hours, cost, changes of the number.

`compared` simulates and `figures` sums up; `plot` draws the outcomes over time as SVG.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from workers.autoscaler.policy import Rules
from workers.trials.bench.figures import POINTS, Panel, drawn
from workers.trials.simulate.scalers import CpuHpa, Keda, Policy, clairvoyant
from workers.trials.simulate.simulation import SAMPLE, Outcome, Scaler, Simulation, Task, WorkerModel
from workers.trials.simulate.traces import TIERS, Arrival

POLICY, KEDA, HPA, CLAIRVOYANT = "policy", "keda listLength", "hpa cpu", "clairvoyant"
SCALERS: Final[dict[str, Callable[[Rules], Scaler]]] = {
    KEDA: lambda rules: Keda(rules.min, rules.max),
    HPA: lambda rules: CpuHpa(rules.min, rules.max),
}
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Objective:
    """`share` of the priority tasks have their first token within `ttft` seconds of their arrival."""

    ttft: float = 2.0
    share: float = 0.99

    def met(self, out: Outcome) -> float:
        """The share of priority tasks that had it; 1 if there was none."""
        times = [time_to_first(task) for task in out.tasks if task.rank == 0]
        return sum(time <= self.ttft for time in times) / len(times) if times else 1.0

    def holds(self, out: Outcome) -> bool:
        return self.met(out) >= self.share


def time_to_first(task: Task) -> float:
    """TTFT (s) from the arrival; infinite for a task that never began."""
    return inf if task.first is None else task.first - task.at


def figures(out: Outcome, objective: Objective, price: float) -> dict[str, Any]:
    """The figures for the table and for --json. `price`: of a worker-hour."""
    hours = out.worker_s / 3600
    return {
        "worker_hours": round(hours, 3),
        "work_hours": round(out.work_s / 3600, 3),
        "cost": round(hours * price, 2),
        "priority_in_time": round(objective.met(out), 5),
        "ttft_s": {tier: _quantiles(out, rank) for rank, tier in enumerate(TIERS) if _has(out, rank)},
        "most_workers": out.max_workers,
        "changes": len(out.changes),
        "turns": out.turns,
        "handed_back": out.handed_back,
        "unfinished": sum(task.ended is None for task in out.tasks),
        "ended_at_s": round(out.ended_at, 1),
    }


def _has(out: Outcome, rank: int) -> bool:
    return any(task.rank == rank for task in out.tasks)


def _quantiles(out: Outcome, rank: int) -> dict[str, float | None]:
    times = sorted(time_to_first(task) for task in out.tasks if task.rank == rank)
    quantiles = {
        name: times[int(share * (len(times) - 1))] for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }
    return {name: round(time, 3) if time < inf else None for name, time in quantiles.items()}


@dataclass(frozen=True, slots=True)
class Settings:
    model: WorkerModel
    rules: Rules
    objective: Objective = field(default_factory=Objective)
    every: float = 1.0
    """Interval (s) of the policy's decisions."""
    price: float = 1.0


@dataclass(frozen=True, slots=True)
class Compared:
    """Outcomes by the scaler's name. The clairvoyant one is missing where no schedule holds the objective."""

    settings: Settings
    outcomes: dict[str, Outcome]

    @property
    def met(self) -> float:
        return self.settings.objective.met(self.outcomes[POLICY])

    @property
    def holds(self) -> bool:
        return self.settings.objective.holds(self.outcomes[POLICY])

    def to_dict(self) -> dict[str, Any]:
        """The figures; `of_clairvoyant`: worker-hours in those of the clairvoyant schedule."""
        best = self.outcomes.get(CLAIRVOYANT)
        scalers = {}
        for name, out in self.outcomes.items():
            ratio = None if best is None else round(out.worker_s / best.worker_s, 3)
            scalers[name] = {**figures(out, self.settings.objective, self.settings.price), "of_clairvoyant": ratio}
        return {"scalers": scalers, "settings": asdict(self.settings), "tasks": len(self.outcomes[POLICY].tasks)}


def compared(
    arrivals: Sequence[Arrival],
    settings: Settings,
    others: bool = True,
    note: Callable[[str, float], None] = lambda name, at: None,
) -> Compared:
    """`others`: also simulate what the policy is compared with. `note` gets a scaler's name and its simulated time."""
    scalers: dict[str, Scaler] = {POLICY: Policy(settings.rules, settings.every)}
    if others:
        scalers |= {name: make(settings.rules) for name, make in SCALERS.items()}
    outcomes = {
        name: Simulation(arrivals, settings.model, scaler, partial(note, name), settings.rules.min).run()
        for name, scaler in scalers.items()
    }
    if others:
        best = clairvoyant(
            arrivals, settings.model, settings.rules, settings.objective.holds, partial(note, CLAIRVOYANT)
        )
        if best is not None:
            outcomes[CLAIRVOYANT] = best.outcome
    return Compared(settings, outcomes)


def plot(outcomes: Mapping[str, Outcome], title: str, price: float) -> str:
    """The SVG's text; at most four outcomes can be distinguished."""
    panels = [
        _panel("waiting tasks", "priority and default", outcomes, lambda out: _line(out, "hurried")),
        _panel("workers", "with those that start or drain", outcomes, lambda out: _line(out, "up")),
        _panel("p95 of the TTFT of priority", "s", outcomes, _ttft),
        _panel("cost", "so far", outcomes, lambda out: _line(out, "worker_s", price / 3600)),
    ]
    return drawn(panels, 2, title)


def _panel(title: str, note: str, outcomes: Mapping[str, Outcome], points: Callable[[Outcome], Points]) -> Panel:
    return Panel(f"{title} ({note})", "hours", [(name, points(out)) for name, out in outcomes.items()])


def _line(out: Outcome, name: str, factor: float = 1.0) -> Points:
    return _thin([(sample.at / 3600, getattr(sample, name) * factor) for sample in out.samples])


def _ttft(out: Outcome) -> Points:
    """p95 of the tasks that arrived in each ten minutes."""
    length, slots = 10 * SAMPLE, defaultdict(list)
    for task in out.tasks:
        if task.rank == 0 and task.first is not None:
            slots[int(task.at / length)].append(time_to_first(task))
    return [
        (slot * length / 3600, sorted(times)[int(0.95 * (len(times) - 1))]) for slot, times in sorted(slots.items())
    ]


def _thin(points: Points) -> Points:
    """The largest of each few points, as many as can be seen."""
    each = -(-len(points) // POINTS)
    return [max(points[k : k + each], key=lambda point: point[1]) for k in range(0, len(points), each)]
