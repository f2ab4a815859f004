"""Counts of the tasks that wait, exact whichever process dies, and the bounds on them by which ADMIT refuses.

    ADMIT, BATCH_EXPAND: counted ─▶ CLAIM starts it, or any end: counted no more ─▶ RELEASE: counted again

    PRESSURE: how full a queue is ─▶ the stage of overload, one for all gateways

A record's `waits` says that the task is counted, and as what: `<kind> <tokens> <queue>`. The script that changes the
record changes the counts (`scripts/_waiting.lua`). A kind is a tier, or `line`: a line of a batch, which is counted
apart. A plain Celery task has no record before its first CLAIM, so it is counted only after a worker gave it back. A
task whose worker died is not counted: it was started, and the next CLAIM starts it again.

| hash | what it counts |
| --- | --- |
| `penstock:waiting` | tasks, by kind, and by kind and queue |
| `penstock:waiting:tokens` | KV tokens that they may need, by kind and queue; `results`: `result_bytes` of all, / 8 |
| `penstock:waiting:tenants`, `:keys` | tasks by tenant and by key, without lines |
| `penstock:waiting:memory` | how full the server was at the last look (`scripts/_memory.lua`) |
| `penstock:drain:<queue>` | `started`: KV tokens of tasks that waited and were started; also the rate, and the stage |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import Call, arun, script, text
from producers.contract import keys
from producers.contract.levels import beside
from producers.errors import QueueFull

#: Tier -> share of a bound that may be taken, by all tiers or, for priority, by its own tasks. It is at least one task,
#: so that a small bound refuses no tier while nothing waits.
PARTS: Final = {"priority": 1.0, "default": 0.95, "flex": 0.8, "batch": 0.6}
#: Stages of overload, in order. Each one does what those before it do.
STAGES: Final = ("normal", "shed", "shorten", "priority")
#: Pressure (share of a bound, or of the longest wait) at which each stage is left again; `pressure.lua` has the same.
LEAVES_AT: Final = (0.0, 0.6, 0.7, 0.8)
#: Bytes that a KV token of a waiting task counts; `_memory.lua` has the same.
TOKEN_BYTES: Final = 8
#: The stage from which on outputs are shortened, of keys that say so.
SHORTENS: Final = STAGES.index("shorten")
#: Tier -> the stage from which on it is refused.
REFUSED: Final = {"priority": 4, "default": 3, "flex": 1, "batch": 1}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most tasks that may wait, for a gateway's callers; 0: any number. Lines of batches are not counted here."""

    in_all: int = 0
    pool: int = 0
    """Tasks of one model version."""
    tenant: int = 0
    """Tasks of one tenant, in all pools; tasks without a tenant share one bound."""
    key: int = 0
    """Tasks of one API key, in all pools."""
    kept: int = 0
    """The most bytes of one tenant's tasks in the store, waiting or not (`scripts/_kept.lua`); 0: any number."""

    def of(self, tier: str) -> int:
        """The most tasks of this tier that may ever wait; 0: any number."""
        shared = [max(1, int(bound * PARTS[tier])) for bound in (self.in_all, self.pool) if bound]
        return min([*shared, *(bound for bound in (self.tenant, self.key) if bound)], default=0)


@dataclass(frozen=True, slots=True)
class Room:
    """The bounds that hold for a task of one key."""

    bounds: Bounds
    key: str | None = None

    def to_json(self, queue: str, tier: str, tenant: str) -> str:
        """The bounds, as ADMIT takes them; empty where there is none."""
        return _bounds_json(self.bounds, queue, tier, tenant, self.key)


@lru_cache(maxsize=4096)
def _bounds_json(bounds: Bounds, queue: str, tier: str, tenant: str, key: str | None) -> str:
    tiers = [tier] if tier == "priority" else list(keys.TIERS)  # it waits for no other tier
    queue_fields = [f"{kind} {its}" for its in beside(queue) for kind in tiers]
    rows: list[tuple[str, list[str], int, str]] = []
    for bound, fields, name in ((bounds.in_all, tiers, "all"), (bounds.pool, queue_fields, "pool")):
        if bound:
            rows.append((keys.WAITING, fields, max(1, int(bound * PARTS[tier])), name))
    if bounds.tenant:
        rows.append((keys.WAITING_TENANTS, [tenant], bounds.tenant, "tenant"))
    if bounds.key and key is not None:
        rows.append((keys.WAITING_KEYS, [key], bounds.key, "key"))
    if bounds.kept:
        rows.append((keys.kept(tenant), ["total"], bounds.kept, "kept"))
    return json.dumps(rows) if rows else ""


def refused(answer: Sequence[Any]) -> QueueFull:
    """The error for what ADMIT answered where a bound was reached: `full`, and which."""
    return QueueFull(text(answer[1]), int(answer[2]), int(answer[3]))


@dataclass(frozen=True, slots=True)
class Pressure:
    """A queue's fullness, and the stage of overload (index into STAGES) that follows."""

    stage: int = 0
    share: float = 0.0
    """The used share of the bound, or of the longest wait, that is nearest to its limit."""
    tasks: int = 0
    tokens: int = 0
    """Waiting tasks without lines of batches, and the KV tokens that they may need."""
    rate: float = 2500.0
    """KV tokens of tasks that are started in a second."""
    served: bool = False


async def pressure(store: Redis, queue: str, bounds: Bounds, max_wait: float) -> Pressure:
    """PRESSURE: measure a version's queue, and those beside it. `max_wait`: the longest wait (s) of interactive tasks;
    0: any.

    Raises redis.exceptions.RedisError or OSError.
    """
    _, *levels = beside(queue)
    arguments: list[str | int | float] = [queue, bounds.pool, bounds.in_all, max_wait, *levels]
    call = Call(script("producers.store", "pressure"), (keys.drain(queue),), arguments)
    stage, share, tasks, tokens, rate, served = map(int, await arun(store, call))
    return Pressure(stage, share / 1000, tasks, tokens, rate / 1000, bool(served))


async def promised(store: Redis) -> int:
    """The bytes that the results of waiting tasks may take. Raises as `pressure` does."""
    return TOKEN_BYTES * sum(map(int, await store.hvals(keys.WAITING_TOKENS)))


def model_of(queue: str) -> str:
    """`<model>@<version>`, of a version's queue."""
    return queue.removeprefix(keys.version_queue("", "").removesuffix("@"))


async def queues(store: Redis) -> dict[str, dict[str, int]]:
    """Queue -> kind -> tasks that wait there; under the empty name, in all. Raises as `pressure` does."""
    counts: dict[str, dict[str, int]] = {}
    for name, number in (await store.hgetall(keys.WAITING)).items():
        kind, _, queue = text(name).partition(" ")
        counts.setdefault(queue, {})[kind] = int(number)
    return counts
