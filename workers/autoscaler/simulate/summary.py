"""Figures of an outcome: TTFT by tier, worker-hours, cost, and how often the number changed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from workers.autoscaler.simulate.simulation import Outcome
from workers.autoscaler.simulate.trace import TIERS
from workers.autoscaler.simulate.worker import Task


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
