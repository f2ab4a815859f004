"""A rollout's two versions by what the fleet says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from producers.admin.fleet import Fleet
from producers.contract.profile import sane
from producers.store.fleet.rollouts import Rollout
from producers.store.fleet.scaling import is_fresh
from workers.autoscaler import watch
from workers.autoscaler.pools import PoolSettings

#: Time (s) in which an autoscaler has noticed a rollout.
SOON_S: Final = 5.0


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
    """The reason why new workers do not come up, as an autoscaler says it."""
    failures: int
    """Starts in a row that failed."""
    given_up: bool
    """Whether the new version's own autoscaler has given its starts up since the rollout was asked for."""
    starts: bool
    """Whether an autoscaler starts workers of the new version, or may in a moment."""
    ends: bool
    """Whether one ends those of the old version: it scales them apart from others."""

    @property
    def told(self) -> tuple[int | bool, ...]:
        """The part that a person is told again if it changes: not the seconds that are left until another try."""
        return self.ready, self.unready, self.failures, bool(self.trouble), self.starts

    @classmethod
    def of(cls, fleet: Fleet, rollout: Rollout) -> Seen:
        new, old = (PoolSettings(rollout.model, version) for version in (rollout.version, rollout.before))
        workers = list(watch.workers(watch.served(fleet, new)))
        ready = sum(map(watch.takes_tasks, workers))
        state = fleet.scaling.states.get(new.name) or fleet.scaling.states.get(rollout.model) or {}
        fresh = is_fresh(state.get("at"), fleet.at)
        return cls(
            ready,
            len(workers) - ready,
            sum(not one.get("draining") for one in watch.workers(watch.served(fleet, old))),
            watch.remaining_tasks(fleet, old),
            str(state.get("trouble") or "") if fresh else "",
            _failures(state) if fresh else 0,
            fresh and _given_up(fleet.scaling.states.get(new.name) or {}, rollout),
            _scaled(fleet, new) or (bool(fleet.scaling.leads) and fleet.at - rollout.asked < SOON_S),
            _scaled(fleet, old),
        )


def _scaled(fleet: Fleet, pool: PoolSettings) -> bool:
    """Whether an autoscaler decides on this pool: one that ended may have left its state there."""
    state = fleet.scaling.states.get(pool.name) or {}
    return bool(fleet.scaling.leads) and is_fresh(state.get("at"), fleet.at)


def _failures(state: dict[str, Any]) -> int:
    starts = state.get("starts")
    return int(sane(starts.get("failures")) or 0) if isinstance(starts, dict) else 0


def _given_up(state: dict[str, Any], rollout: Rollout) -> bool:
    """Not by the state of all versions together: that may tell of the old one's starts."""
    return (sane(state.get("given_up")) or 0.0) >= rollout.asked


def ready(fleet: Fleet, model: str) -> int:
    """Workers that take new tasks of the model now."""
    current = PoolSettings(model, fleet.versions.get(model))
    return sum(map(watch.takes_tasks, watch.workers(watch.served(fleet, current))))
