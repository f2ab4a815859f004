"""The policy and what it is compared with, on one trace: TTFT by tier, worker-hours, cost, changes of the number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Any, Final

from workers.autoscaler.policy.rules import Rules
from workers.autoscaler.simulate.clairvoyant import clairvoyant
from workers.autoscaler.simulate.scalers import CpuHpa, Keda, Policy
from workers.autoscaler.simulate.simulation import Outcome, Scaler, Simulation
from workers.autoscaler.simulate.trace import TIERS, Arrival
from workers.autoscaler.simulate.worker import Task, WorkerModel

POLICY, KEDA, HPA, CLAIRVOYANT = "policy", "keda listLength", "hpa cpu", "clairvoyant"
SCALERS: Final[dict[str, Callable[[Rules], Scaler]]] = {
    KEDA: lambda rules: Keda(rules.min, rules.max),
    HPA: lambda rules: CpuHpa(rules.min, rules.max),
}


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
    """For the table, and for --json. `price`: of a worker-hour."""
    hours = out.worker_s / 3600
    return {
        "worker_hours": round(hours, 3),
        "work_hours": round(out.work_s / 3600, 3),
        "cost": round(hours * price, 2),
        "priority_in_time": round(objective.met(out), 5),
        "ttft_s": {tier: _quantiles(out, rank) for rank, tier in enumerate(TIERS) if _has(out, rank)},
        "most_workers": out.most,
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
    found = {name: times[int(share * (len(times) - 1))] for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    return {name: round(time, 3) if time < inf else None for name, time in found.items()}


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
        found = {}
        for name, out in self.outcomes.items():
            ratio = None if best is None else round(out.worker_s / best.worker_s, 3)
            found[name] = {**figures(out, self.settings.objective, self.settings.price), "of_clairvoyant": ratio}
        return {"scalers": found, "settings": asdict(self.settings), "tasks": len(self.outcomes[POLICY].tasks)}


def compared(
    arrivals: Sequence[Arrival],
    settings: Settings,
    others: bool = True,
    note: Callable[[str, float], None] = lambda name, at: None,
) -> Compared:
    """`others`: also simulate what the policy is compared with. `note` hears which scaler is simulated up to when."""
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
