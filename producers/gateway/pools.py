"""The state of all pools, as broker and store have it: what is queued, in flight, and what the workers say.

Read by whoever asks for /metrics, so the figures are there at zero workers.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import text
from producers.contract import keys

QUEUE_PREFIX: Final = keys.model_queue("")


@dataclass(slots=True)
class Pool:
    """A queue and those who serve it. `name`: `model@version.fingerprint`, or the bare model's name for the queue of
    plain Celery senders, which all pools of the model take from."""

    name: str
    model: str
    queued: dict[str, int] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, 0))
    #: Tenants of whom something waits, as far as workers have sorted it.
    tenants: dict[str, int] = field(default_factory=lambda: dict.fromkeys(keys.TIERS, 0))
    delayed: int = 0
    in_flight: int = 0
    #: What each live worker says of itself in its lease (see `workers.runtime.assembly`).
    workers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Left:
    """Tasks that wait for a sweeper, should nobody else come first: how many, and how long the first of them does."""

    count: int = 0
    oldest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """All pools, what no pool's worker will ever take, and what sweepers do. `swept`: what they did -> how often."""

    pools: list[Pool]
    dead_letters: int = 0
    submitting: Left = Left()
    unsettled: Left = Left()
    to_compact: Left = Left()
    sweeper_leads: bool = False
    swept: dict[str, int] = field(default_factory=dict)


async def read_fleet(store: Redis, broker: Redis) -> Fleet:
    """In three round trips, whatever their number. Raises redis.exceptions.RedisError or OSError."""
    models, about, leads, swept, now, *left = await _ask(
        store,
        ("HKEYS", keys.MODELS),
        ("HGETALL", keys.POOLS),
        ("EXISTS", keys.SWEEPER),
        ("HGETALL", keys.SWEPT),
        ("TIME",),
        *(
            command
            for index in (keys.SUBMITTING, keys.UNSETTLED, keys.SETTLED)
            for command in (("ZCARD", index), ("ZRANGE", index, "0", "0", "WITHSCORES"))
        ),
    )
    served = {keys.model_queue(text(model)): text(model) for model in models}
    served |= {text(queue): json.loads(pool)["model"] for queue, pool in about.items()}
    lists = [(queue, tier, name) for queue in served for tier in keys.TIERS for name in keys.tier_lists(queue, tier)]
    alive, dead_letters, *counts = await _ask(
        broker,
        ("HGETALL", keys.INCARNATIONS),
        ("LLEN", keys.DEAD),
        *(("LLEN", name) for _, _, name in lists),
        *(("ZCARD", keys.sorted_of(name)) for _, _, name in lists),
        *(("ZCARD", keys.turns(name)) for _, _, name in lists),
        *(("ZCARD", keys.delayed(queue)) for queue in served),
    )
    pools = {
        queue: Pool(queue.removeprefix(QUEUE_PREFIX), model, delayed=delayed)
        for (queue, model), delayed in zip(served.items(), counts[3 * len(lists) :], strict=True)
    }
    arrived, sorted_, tenants = (counts[k * len(lists) : (k + 1) * len(lists)] for k in range(3))
    for (queue, tier, _), *waiting, waiters in zip(lists, arrived, sorted_, tenants, strict=True):
        pools[queue].queued[tier] += sum(waiting)
        pools[queue].tenants[tier] += waiters
    taking = [(text(name), pools[text(queue)]) for name, queue in alive.items() if text(queue) in pools]
    in_flight, leases = await asyncio.gather(
        _ask(broker, *(("HLEN", keys.inflight(name)) for name, _ in taking)),
        _ask(store, *(("GET", keys.lease(name)) for name, _ in taking)),
    )
    for (_, pool), held, lease in zip(taking, in_flight, leases, strict=True):
        pool.in_flight += held
        if lease is not None:
            pool.workers.append(json.loads(lease))
    submitting, unsettled, to_compact = (_left(*one, now) for one in zip(left[::2], left[1::2], strict=True))
    done = {text(what): int(count) for what, count in swept.items()}
    return Fleet(list(pools.values()), dead_letters, submitting, unsettled, to_compact, bool(leads), done)


def _left(count: int, first: list[Any], now: Any) -> Left:
    seconds, micros = now
    return Left(count, max(0.0, seconds + micros / 1e6 - float(first[1]) / 1000) if first else 0.0)


async def _ask(server: Redis, *commands: tuple[str, ...]) -> list[Any]:
    if not commands:
        return []
    async with server.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = await pipe.execute()
        return answers
