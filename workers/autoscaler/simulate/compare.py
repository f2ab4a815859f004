"""The policy and what it is compared with, on one trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from workers.autoscaler.policy.rules import Rules
from workers.autoscaler.simulate.clairvoyant import clairvoyant
from workers.autoscaler.simulate.scalers import CpuHpa, Keda, Policy
from workers.autoscaler.simulate.simulation import Outcome, Scaler, Simulation
from workers.autoscaler.simulate.summary import Objective, figures
from workers.autoscaler.simulate.trace import Arrival
from workers.autoscaler.simulate.worker import WorkerModel

POLICY, KEDA, HPA, CLAIRVOYANT = "policy", "keda listLength", "hpa cpu", "clairvoyant"
SCALERS: Final[dict[str, Callable[[Rules], Scaler]]] = {
    KEDA: lambda rules: Keda(rules.min, rules.max),
    HPA: lambda rules: CpuHpa(rules.min, rules.max),
}


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
