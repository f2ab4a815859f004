"""Decisions of the autoscaler: the latest of each pool, and the history of those that changed something.

A pool's state, one JSON object in the hash `penstock:scale:pools` under the pool's name (a model, or model@version):

    at        unix seconds, on the store's clock, of the last decision: written every few seconds while one leads
    model     the model's name
    wanted    the number of workers that the policy wants: what `penstock_desired_workers` exports
    told      the number that the actuator is told: fewer than `wanted` while workers do not come up
    reason    why, in words
    raw       {"a", "b", "c", "d", "raw"}: the policy's numbers (`workers.autoscaler.policy`)
    signals   what the policy saw (`workers.autoscaler.policy.Signals`); null where nothing could be read
    before    what the policy remembered (`workers.autoscaler.policy.Memory`): with signals and rules, its inputs
    memory    what it remembers since; null while it is not known how many workers there are
    rules     the settings that it went by (`workers.autoscaler.policy.Rules`)
    starts    what is remembered of starts that failed (`workers.autoscaler.control`)
    actual    {"wanted", "up", "failing", "failures", "standbys"}: what the actuator found; null with no actuator
    actuator  its name, or "" where another program follows the exported number
    trouble   what keeps workers from coming up, in words; empty if nothing does
    pin       {"workers", "by", "at", "until"}, an operator's, which decides instead of the policy; or null
    given_up  unix seconds of the failed start after which the next try is far off; null while starts are tried
    by        the autoscaler that decided

An entry of the stream `penstock:scale:decisions` has the fields `pool` and `decision` (the same JSON). It is written
when the number or the trouble changes, in the same script as the state, and only by the autoscaler that leads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from redis.asyncio import Redis

from producers.connection.script import Call, arun, parsed, script, seconds, text
from producers.contract import keys
from producers.contract.profile import sane
from producers.store.access.audit import Change
from producers.store.protocol import PACKAGE, swap

#: Approximate number of decisions that are kept.
MAX_DECISIONS: Final = 10_000
#: Age (s) of a state from which the leader forgets a pool that it does not scale.
FORGOTTEN_S: Final = 24 * 3600.0
#: Age (s) of a state from which on nobody leads, and its number counts no more.
STALE_S: Final = 30.0
#: The shortest and the longest time (s) of a pin that ends by itself.
SHORTEST_PIN_S, LONGEST_PIN_S = 1.0, 366 * 86_400.0


def keep(me: str, pool: str, state: dict[str, Any], *, changed: bool) -> Call:
    """SCALE: write a pool's state, and the decision if it changed something. Answers 1, or 0 where `me` leads not."""
    state_json = json.dumps(state)
    return _scale(me, pool, state_json, state_json if changed else "")


def drop(me: str, pool: str) -> Call:
    """SCALE: remove the state of a pool that is scaled no more. Answers as `keep`."""
    return _scale(me, pool, "", "")


def _scale(me: str, pool: str, state: str, entry: str) -> Call:
    return Call(
        script(PACKAGE, "scale"),
        (keys.SCALE_LEADER, keys.SCALE_POOLS, keys.SCALE_DECISIONS, keys.SCALE_RETRIES),
        (me, pool, state, entry, MAX_DECISIONS),
    )


async def forget(store: Redis, pools: Iterable[str]) -> None:
    """Forget the states of pools whose workers all start again. Raises redis.RedisError or OSError."""
    await store.execute_command("HDEL", keys.SCALE_POOLS, *pools)


async def states(store: Redis) -> dict[str, dict[str, Any]]:
    """The latest state of each pool. Raises redis.RedisError or OSError."""
    return read_states(await store.execute_command("HGETALL", keys.SCALE_POOLS))


def read_states(raw: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """States from HGETALL's answer; an unreadable one is empty."""
    return {text(pool): parsed(state) for pool, state in raw.items()}


def is_fresh(at: Any, now: float) -> bool:
    """Whether somebody decided at `at` (unix s), and leads still. A time far ahead of the store's clock is nonsense."""
    when = sane(at)
    return when is not None and abs(now - when) <= STALE_S


async def retry(store: Redis, pool: str) -> None:
    """Ask for another try to start a pool's workers. Raises redis.RedisError or OSError."""
    await store.execute_command("HSET", keys.SCALE_RETRIES, pool, repr(seconds(await store.time())))


@dataclass(frozen=True, slots=True)
class Pin:
    """A pool's number of workers as an operator set it: until `until` (unix s; None: until it is removed)."""

    workers: int
    by: str
    at: float
    until: float | None = None

    @classmethod
    def of(cls, raw: Any) -> Self | None:
        """A stored pin; None for a missing or unreadable one."""
        fields = raw if isinstance(raw, dict) else parsed(raw) if isinstance(raw, str | bytes) else {}
        workers, at, until = (sane(fields.get(name)) for name in ("workers", "at", "until"))
        if workers is None or at is None:
            return None
        return cls(int(min(workers, 10**6)), str(fields.get("by") or ""), at, until)

    def holds(self, at: float) -> bool:
        return self.until is None or at < self.until


async def pins(store: Redis) -> dict[str, Pin]:
    """Pool -> its pin. Raises redis.RedisError or OSError."""
    raw = await store.execute_command("HGETALL", keys.SCALE_PINS)
    return {text(pool): pin for pool, value in raw.items() if (pin := Pin.of(value)) is not None}


def checked_pin(state: Mapping[str, Any], workers: int) -> int:
    """The number, if the pool's settings allow it. `state`: the pool's. Raises ValueError."""
    rules = state.get("rules")
    max_workers = sane(rules.get("max")) if isinstance(rules, dict) else None
    if workers < 0 or (max_workers is not None and workers > max_workers):
        raise ValueError(f"{workers} workers: the pool has 0 to {max_workers or 0:.0f}; its setting max says so")
    return workers


async def pin(store: Redis, pool: str, pinned: Pin, change: Change) -> None:
    """Set a pool's number of workers, in place of an earlier pin. Raises redis.RedisError or OSError."""
    await _swap_pin(store, pool, json.dumps(asdict(pinned)), change)


async def unpin(store: Redis, pool: str, change: Change | None = None) -> bool:
    """Let the policy decide again. False: there was no pin. Raises redis.RedisError or OSError."""
    return await _swap_pin(store, pool, "", change)


async def _swap_pin(store: Redis, pool: str, new: str, change: Change | None) -> bool:
    """Change a pin together with its entry of the audit log. `new`: JSON; empty: none. Returns whether it changed."""
    while (old := text(await store.execute_command("HGET", keys.SCALE_PINS, pool) or "")) != new:
        if await arun(store, swap(keys.SCALE_PINS, pool, old, new, audit=change)):
            if change is not None:
                change.say()
            return True
    return False


async def decisions(store: Redis, pool: str, count: int) -> list[dict[str, Any]]:
    """The last decisions of a pool that changed something, the newest first. Raises redis.RedisError or OSError."""
    return [decision for _, decision in await latest(store, pool, count)]


async def latest(
    store: Redis, pool: str | None, count: int, scanned: int = 2 * MAX_DECISIONS
) -> list[tuple[str, dict[str, Any]]]:
    """(pool, decision) of the last decisions that changed something, of one pool or of all; the newest first.

    `scanned`: of how many decisions of all pools, about: each has kilobytes. Raises redis.RedisError or OSError."""
    result: list[tuple[str, dict[str, Any]]] = []
    last = "+"
    while len(result) < count and scanned > 0:
        size = count if pool is None else 500
        entries: list[Any] = await store.xrevrange(keys.SCALE_DECISIONS, max=last, count=size) or []
        fields = [{text(k): text(v) for k, v in entry.items()} for _, entry in entries]
        result += [
            (entry.get("pool", ""), parsed(entry.get("decision")))
            for entry in fields
            if pool in (None, entry.get("pool"))
        ]
        scanned -= size
        if len(entries) < size:
            break
        last = f"({text(entries[-1][0])}"
    return result[:count]
