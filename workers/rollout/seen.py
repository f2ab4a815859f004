"""What the fleet says of a rollout's two versions."""

from __future__ import annotations

from dataclasses import dataclass

from producers.admin.fleet import Fleet
from producers.store.rollouts import Rollout
from producers.store.scaling import STALE_S
from workers.autoscaler import watch
from workers.autoscaler.pools import PoolSettings


@dataclass(frozen=True, slots=True)
class Seen:
    """One look."""

    ready: int
    """Workers of the new version that take tasks."""
    unready: int
    """Those that have a lease and take none."""
    old: int
    """Workers of the old version that do not drain."""
    left: int | None
    """Tasks of the old version that are queued, delayed or in flight; None where a number is missing."""
    trouble: str
    """What keeps new workers from coming up, as an autoscaler says it."""
    scaled: bool
    """Whether an autoscaler leads."""

    @classmethod
    def of(cls, fleet: Fleet, rollout: Rollout) -> Seen:
        new, old = (PoolSettings(rollout.model, version) for version in (rollout.version, rollout.before))
        workers = list(watch.workers(watch.served(fleet, new)))
        ready = sum(map(watch.takes_tasks, workers))
        state = fleet.scaling.states.get(new.name) or fleet.scaling.states.get(rollout.model) or {}
        fresh = fleet.at - float(state.get("at") or 0) <= STALE_S
        return cls(
            ready,
            len(workers) - ready,
            sum(not one.get("draining") for one in watch.workers(watch.served(fleet, old))),
            watch.left(fleet, old),
            str(state.get("trouble") or "") if fresh else "",
            bool(fleet.scaling.leads),
        )


def ready(fleet: Fleet, model: str) -> int:
    """Workers that take new tasks of the model now."""
    current = PoolSettings(model, fleet.versions.get(model))
    return sum(map(watch.takes_tasks, watch.workers(watch.served(fleet, current))))
