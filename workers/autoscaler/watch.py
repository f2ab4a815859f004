"""Reads one pool from the fleet: its signals, its remaining tasks, and which workers go first.

A number that is negative, NaN or no number counts as missing. Leases lapse, so no stale one comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import fmean, median
from typing import Any, Final

from producers.admin.fleet import Fleet, Pool
from producers.contract import keys, levels
from producers.contract.keys import takes_from
from producers.contract.levels import split
from producers.contract.profile import Profile, sane
from producers.store.fleet.cards import profile_field
from workers.autoscaler.policy import LevelQueue, Signals, TierQueue
from workers.autoscaler.pools import PoolSettings

Worker = dict[str, Any]
#: No worker counts as having less of its device.
LEAST_SHARE: Final = 0.02


def served(fleet: Fleet, pool: PoolSettings) -> list[Pool]:
    """The queues that count for the pool: all of its model's, or its version's and those of the version's pools.

    The model's own queue, of plain Celery senders, counts for the version of the card.
    """
    mine = [queue for queue in fleet.pools if queue.model == pool.model]
    if pool.version is None:
        return mine
    version = profile_field(pool.model, pool.version)
    current = fleet.versions.get(pool.model) == pool.version
    return [
        queue for queue in mine if takes_from(split(queue.name)[0], version) or (current and queue.name == pool.model)
    ]


def signals(fleet: Fleet, pool: PoolSettings) -> Signals:
    """The policy's input. For a model with neither a card nor workers, everything is missing."""
    here, missing = served(fleet, pool), _Missing()
    queues = [queue for queue in here if split(queue.name)[1] <= levels.LEVEL]
    if pool.model not in fleet.versions and all(queue.name == pool.model for queue in queues):
        return Signals(fleet.at, missing=("queued", "in_flight", "card"))
    working = [worker for worker in workers(queues) if takes_tasks(worker)]
    in_flight = missing.sum("in_flight", (queue.in_flight for queue in queues))
    throughput = missing.sum("patient", (worker.get("patient", 0) for worker in workers(queues)))
    unknown_kinds = [count for queue in here if queue not in queues for count in queue.queued.values()]
    return Signals(
        fleet.at,
        {tier: _tier(queues, tier, missing) for tier in keys.TIERS},
        in_flight,
        min(throughput, in_flight),
        len(working),
        missing.sum("running", (worker.get("running", 0) for worker in working)),
        _kv_used(working),
        _profile(fleet, pool, working),
        _turn_share(working),
        _levels(queues, working),
        missing.sum("queued", unknown_kinds),
        tuple(missing.names),
    )


def _levels(queues: Sequence[Pool], working: Sequence[Worker]) -> tuple[LevelQueue, ...]:
    """The tasks that not every release can do, and the workers that can. Bad numbers count as 0: then `queued` is
    missing."""
    waiting: dict[int, dict[str, int]] = {}
    for queue in queues:
        if (level := split(queue.name)[1]) and any(map(sane, queue.queued.values())):
            for tier, count in queue.queued.items():
                tiers = waiting.setdefault(level, dict.fromkeys(keys.TIERS, 0))
                tiers[tier] = tiers.get(tier, 0) + int(sane(count) or 0)
    level_queues = []
    for level in sorted(waiting):
        able = [worker for worker in working if (sane(worker.get("level")) or 0) >= level]
        tiers = {tier: sum(waiting[other].get(tier, 0) for other in waiting if other >= level) for tier in keys.TIERS}
        in_flight = sum((sane(worker.get("tasks")) or 0) - (sane(worker.get("patient")) or 0) for worker in able)
        level_queues.append(LevelQueue(level, tiers, len(working) - len(able), len(able), max(0, int(in_flight))))
    return tuple(level_queues)


def remaining_tasks(fleet: Fleet, pool: PoolSettings) -> int | None:
    """Tasks of the pool that are queued, delayed or in flight; None if a number is missing."""
    missing = _Missing()
    queues = served(fleet, pool)
    total = sum(missing.sum("queued", queue.queued.values()) for queue in queues)
    total += missing.sum("delayed", (queue.delayed for queue in queues))
    total += missing.sum("in_flight", (queue.in_flight for queue in queues))
    return None if missing.names else total


def workers(queues: Iterable[Pool]) -> Iterator[Worker]:
    """The leases of the queues' workers."""
    return (worker for queue in queues for worker in queue.workers)


def takes_tasks(worker: Worker) -> bool:
    return not worker.get("draining") and not worker.get("unready")


def unready_reasons(fleet: Fleet, pool: PoolSettings) -> str:
    """The reasons why workers that are there take no tasks, with their names; empty if all do."""
    unready = [worker for worker in workers(served(fleet, pool)) if worker.get("unready")]
    return "; ".join(f"{worker['worker']} ({_listed(worker['unready'])})" for worker in unready)


def _listed(reasons: Any) -> str:
    return ", ".join(map(str, reasons)) if isinstance(reasons, list) else str(reasons)


def stranded(fleet: Fleet, pool: PoolSettings) -> str:
    """The text for versions that tasks wait for and no worker serves, though workers of others are up; empty if none.

    Only for a pool that has no version of its own: its platform starts the version that it was given.
    """
    queues = served(fleet, pool) if pool.version is None else []
    up = {_version(fleet, queue) for queue in queues if queue.workers}
    lacking = {_version(fleet, queue) for queue in queues if any(map(sane, queue.queued.values()))} - up
    if not up or not lacking:
        return ""
    return (
        f"tasks wait for version {', '.join(sorted(lacking))}, and the workers that are up serve "
        f"{', '.join(sorted(up))}: start workers of the version that tasks wait for"
    )


def _version(fleet: Fleet, queue: Pool) -> str:
    """The version that a queue's tasks are for. The model's own queue is for the card's."""
    named = split(queue.name)[0].removeprefix(queue.model)[1:].partition(".")[0]
    return named or fleet.versions.get(queue.model, "")


def victims(fleet: Fleet, pool: PoolSettings) -> list[str]:
    """The names of the pool's workers, in the order in which they should go.

    First those that drain or are broken, then idle ones, then the least loaded. A worker that starts has no lease, so
    it is not named: it holds no task, and goes before all.
    """

    def load(worker: Worker) -> tuple[bool, float, str]:
        counts = [sane(worker.get(key, 0)) for key in ("running", "waiting", "tasks")]
        busy = sum(count for count in counts if count is not None) if None not in counts else float("inf")
        return takes_tasks(worker), busy, str(worker["worker"])

    return [str(worker["worker"]) for worker in sorted(workers(served(fleet, pool)), key=load)]


class _Missing:
    """Adds numbers up, and notes the names of those that are no numbers."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def sum(self, name: str, numbers: Iterable[Any]) -> int:
        total = 0
        for value in numbers:
            number = sane(value)
            if number is not None:
                total += int(number)
            elif name not in self.names:
                self.names.append(name)
        return total


def _tier(queues: Sequence[Pool], tier: str, missing: _Missing) -> TierQueue:
    waiting = missing.sum("queued", (queue.queued.get(tier, 0) for queue in queues))
    ages = [age for queue in queues if (age := sane(queue.oldest_s.get(tier))) is not None]
    return TierQueue(waiting, max(ages, default=None))


def _kv_used(working: Iterable[Worker]) -> float | None:
    used = total = 0.0
    for worker in working:
        blocks, some = sane(worker.get("kv_blocks_total")), sane(worker.get("kv_blocks_used"))
        if blocks and some is not None and some <= blocks:
            used, total = used + some, total + blocks
    return used / total if 0 < total < inf else None


def _turn_share(working: Sequence[Worker]) -> float:
    """The mean of what workers say of their turns; of those that say nothing, or nonsense, 1."""
    shares = [sane(worker.get("turn_share")) for worker in working]
    return fmean(1.0 if share is None else min(1.0, max(LEAST_SHARE, share)) for share in shares) if shares else 1.0


def _profile(fleet: Fleet, pool: PoolSettings, working: Iterable[Worker]) -> Profile:
    """The version's kept profile, into which workers merge what they measure; what it lacks, in the middle of theirs.

    The time to the first token and the duty cycle are those of this moment: the worst and the mean of the workers.
    """
    version = pool.version or fleet.versions.get(pool.model, "")
    kept = fleet.scaling.profiles.get(profile_field(pool.model, version), Profile())
    profiles = [Profile.of(worker.get("profile")) for worker in working]
    starts = [profile.cold_start for profile in profiles if profile.cold_start.get("total")]
    return replace(
        kept,
        reached=None,
        knee=kept.knee or _over(median, (profile.knee for profile in profiles)),
        tokens_per_s=kept.tokens_per_s or _over(median, (profile.tokens_per_s for profile in profiles)),
        tokens_per_task=kept.tokens_per_task or _over(median, (profile.tokens_per_task for profile in profiles)),
        ttft_p95=_over(max, (profile.ttft_p95 for profile in profiles)),
        duty=_over(fmean, (profile.duty for profile in profiles)),
        cold_start=kept.cold_start or max(starts, key=lambda start: start["total"], default={}),
    )


def _over(fold: Callable[[list[float]], float], measured: Iterable[float | None]) -> float | None:
    values = [value for value in measured if value is not None]
    try:
        return sane(fold(values)) if values else None
    except OverflowError:  # of numbers that are finite one by one
        return None
