"""The state of all pools, from broker and store: queued tasks, tasks in flight, and the workers' leases.

It is read at each request for /metrics, so the figures exist at zero workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from producers.broker.base import Broker
from producers.connection.script import aexecute_many, parsed, parsed_value, seconds, text
from producers.contract import keys
from producers.contract.levels import looked_after, split
from producers.contract.profile import Profile, sane
from producers.store.fleet.cards import read_profiles
from producers.store.fleet.scaling import read_states
from producers.store.outbox import Backlog, backlog

QUEUE_PREFIX: Final = keys.model_queue("")


@dataclass(slots=True)
class Pool:
    """A queue and the workers that serve it.

    `name`: `model@version.fingerprint` for a pool; `model@version` for the queue that all pools of the version serve;
    or the bare model's name for the queue of plain Celery senders, which all pools of the model serve. Workers, and
    what they have in flight, count for their pool alone.
    """

    name: str
    model: str
    queued: dict[str, int] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, 0))
    #: Tier -> number of tenants with waiting tasks, as far as workers have sorted them.
    tenants: dict[str, int] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, 0))
    #: Seconds since the task that waits longest was submitted, where that is known.
    oldest_s: dict[str, float] = field(default_factory=dict)
    delayed: int = 0
    in_flight: int = 0
    #: The live workers' leases (see `workers.runtime.assembly`), each with its `incarnation`.
    workers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Tasks that the sweeper will finish unless another process does: their number, and the oldest one's wait."""

    count: int = 0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """The autoscaler's grounds, and its last decisions. Empty where nothing was written, or it makes no sense."""

    leads: str = ""
    """The autoscaler that leads; empty if none does."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Pool -> its latest decision (`producers.store.fleet.scaling`)."""
    retries: dict[str, float] = field(default_factory=dict)
    """Pool -> when an operator last asked for another try (unix s)."""
    profiles: dict[str, Profile] = field(default_factory=dict)
    """`model@version` -> what its workers measured."""
    rollouts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Model -> its rolling update (`producers.store.fleet.rollouts`)."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All pools, dead letters, the sweepers' work, the outbox. `swept`: a sweeper's duty -> how often it was done."""

    pools: list[Pool]
    dead_letters: int = 0
    submitting: Unfinished = Unfinished()
    unsettled: Unfinished = Unfinished()
    to_compact: Unfinished = Unfinished()
    sweeper_leads: bool = False
    swept: dict[str, int] = field(default_factory=dict)
    webhooks: Backlog = field(default_factory=lambda: Backlog({}, {}))
    at: float = 0.0
    """The store's clock (unix s) at the beginning of the reading."""
    versions: dict[str, str] = field(default_factory=dict)
    """Model -> the version of its card, to which new tasks go. Models with unreadable cards are absent."""
    scaling: Scaling = field(default_factory=Scaling)


async def read_fleet(store: Redis, broker: Broker) -> Fleet:
    """Read all pools in six round trips. Raises redis.exceptions.RedisError or OSError."""
    commands = (
        ("HGETALL", keys.MODELS),
        ("HGETALL", keys.POOLS),
        ("EXISTS", keys.SWEEPER),
        ("HGETALL", keys.SWEPT),
        ("TIME",),
        ("GET", keys.SCALE_LEADER),
        *(("HGETALL", key) for key in (keys.SCALE_POOLS, keys.SCALE_RETRIES, keys.PROFILES, keys.ROLLOUTS)),
        *(
            command
            for index in (keys.SUBMITTING, keys.UNSETTLED, keys.SETTLED)
            for command in (("ZCARD", index), ("ZRANGE", index, "0", "0", "WITHSCORES"))
        ),
    )
    models, pool_entries, leads, swept, now, *answers = await aexecute_many(store, commands)
    at = seconds(now)
    scaling, index_answers = _scaling(*answers[:5]), answers[5:]
    pools, dead_letters = await _pools(store, broker, _served(models, pool_entries))
    submitting, unsettled, to_compact = (
        _unfinished(*answer, at) for answer in zip(index_answers[::2], index_answers[1::2], strict=True)
    )
    done = {text(duty): int(count) for duty, count in swept.items()}
    return Fleet(
        pools,
        dead_letters,
        submitting,
        unsettled,
        to_compact,
        bool(leads),
        done,
        await backlog(store),
        at,
        {model: version for model, version in _versions(models).items() if version},
        scaling,
    )


async def _pools(store: Redis, broker: Broker, served: Mapping[str, str]) -> tuple[list[Pool], int]:
    """The pools, with their workers, and the number of dead letters. `served`: the queues, by their models."""
    depths = await broker.depths(list(served))
    pools = {
        queue: Pool(
            queue.removeprefix(QUEUE_PREFIX),
            served[queue],
            its.waiting,
            its.tenants,
            its.oldest,
            its.delayed,
            its.in_flight,
        )
        for queue, its in depths.queues.items()
        if not split(queue)[1] or its.delayed or any(its.waiting.values())
    }
    taking = [(name, pools[queue]) for name, queue in depths.workers.items() if queue in pools]
    leases = await aexecute_many(store, [("GET", keys.lease(name)) for name, _ in taking])
    for (name, pool), lease in zip(taking, leases, strict=True):
        if lease is not None:
            pool.workers.append({"worker": name, **parsed(lease), "incarnation": name})
    return list(pools.values()), depths.dead_letters


def _scaling(leader: Any, states: Any, retries: Any, measured: Any, rollouts: Any) -> Scaling:
    retried = {text(pool): sane(parsed_value(at)) for pool, at in retries.items()}
    return Scaling(
        text(leader or ""),
        read_states(states),
        {pool: at for pool, at in retried.items() if at is not None},
        read_profiles(measured),
        {text(model): parsed(rollout) for model, rollout in rollouts.items()},
    )


def _served(models: Mapping[Any, Any], pools: Mapping[Any, Any]) -> dict[str, str]:
    """The existing queues, by their models, without those of unreadable cards and pools."""
    served: dict[str, str] = {}
    for model, version in _versions(models).items():
        served |= {keys.model_queue(model): model}
        served |= dict.fromkeys(looked_after(keys.version_queue(model, version)), model) if version else {}
    for queue, raw in pools.items():
        entry = parsed(raw)
        if "model" in entry and "version" in entry:
            model = str(entry["model"])
            queue_names = (keys.version_queue(model, str(entry["version"])), text(queue))
            served |= {queue_name: model for name in queue_names for queue_name in looked_after(name)}
    return served


def _versions(models: Mapping[Any, Any]) -> dict[str, str]:
    """Model -> its card's version; empty where that cannot be read."""
    return {text(name): str(parsed(card).get("version") or "") for name, card in models.items()}


def _unfinished(count: int, first: list[Any], at: float) -> Unfinished:
    return Unfinished(count, max(0.0, at - float(first[1]) / 1000) if first else 0.0)
