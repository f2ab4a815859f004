"""Overload: how full each queue is, what is refused or shortened for it, and when a refused caller is to come again.

    a submit ─▶ PRESSURE, at most every FRESH_S ─▶ stage ─▶ normal │ shed │ shorten │ priority
    ADMIT says `full` ──────────────────────────▶ 429, `Retry-After` by what waits and how fast it drains

The stage is kept in the store (`producers.store.waiting`), so that all gateways see the same one. A refused caller is
told when a place will be free, after callers that were refused before: otherwise all would retry at once, and a busy
gateway would do nothing but refuse. A place is free once the tasks before it were started: their tokens, at the rate at
which workers started tokens.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from dataclasses import dataclass, field
from typing import Final

from redis.asyncio import Redis

from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.contract.levels import split
from producers.errors import QueueFull
from producers.gateway.http.errors import Problem
from producers.store import waiting
from producers.store.waiting import LEAVES_AT, REFUSED, STAGES, Bounds, Pressure

logger = logging.getLogger(__name__)

#: Time (s) for which a look counts.
FRESH_S: Final = 0.05
#: Shortest and longest wait (s) that a refused caller is told. Without a worker it is the longest.
SHORTEST_S, LONGEST_S = 0.25, 30.0
#: Bound -> the code of a refusal, and whose tasks are too many.
SAID: Final = {
    "all": ("queue_full", "of all models"),
    "pool": ("queue_full", "of this model"),
    "tenant": ("tenant_queue_full", "of this tenant"),
    "key": ("key_queue_full", "of this key"),
}
#: The code of a refusal by what all callers share.
SHARED: Final = SAID["pool"][0]


@dataclass(slots=True)
class _Queue:
    """What is known of a queue. `line`: when the last refused caller gets a place, at the current rate."""

    pressure: Pressure = field(default_factory=Pressure)
    at: float = -math.inf
    line: float = -math.inf
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Overload:
    """The overload of all queues, as one gateway sees it. `max_wait`: the longest wait (s) of interactive tasks that is
    not overload; 0: any."""

    def __init__(self, store: Redis, bounds: Bounds, max_wait: float = 0.0) -> None:
        self._store = store
        self._bounds = bounds
        self._max_wait = max_wait
        self._bounded = bool(bounds.in_all or bounds.pool or max_wait)
        self._queues: dict[str, _Queue] = {}

    async def look(self, queue: str, store: Redis | None = None) -> Pressure:
        """The pressure of a queue, at most FRESH_S old. While the store is away, there is none: ADMIT will say so.

        `store`: another connection to the store than that for callers' requests.
        """
        return await self._look(queue, store) if self._bounded else Pressure()

    async def _look(self, queue: str, store: Redis | None = None) -> Pressure:
        state = self._queues.setdefault(queue, _Queue())
        if time.monotonic() - state.at <= FRESH_S:
            return state.pressure
        async with state.looking:
            if time.monotonic() - state.at > FRESH_S:  # else another looked meanwhile
                before, state.pressure = state.pressure.stage, await self._measured(queue, store or self._store)
                state.at = time.monotonic()
                if state.pressure.stage != before:
                    changed = (queue, STAGES[before], STAGES[state.pressure.stage], 100 * state.pressure.share)
                    logger.warning("overload of %s: from %s to %s, at %.0f%% of its bounds", *changed)
        return state.pressure

    async def all(self, store: Redis) -> dict[str, Pressure]:
        """Queue -> its pressure, of those where something waits and those that are degraded. While the store is away,
        none. `store`: as of `look`."""
        try:
            async with asyncio.timeout(SILENT_S):
                names = {split(queue)[0] for queue in await waiting.queues(store)} - {""} if self._bounded else set()
        except FAILURES:
            return {}
        names |= {queue for queue, state in self._queues.items() if state.pressure.stage}
        return {queue: await self.look(queue, store) for queue in sorted(names)}

    def check(self, pressure: Pressure, queue: str, tier: str) -> None:
        """Raise Problem (429) where a tier's tasks may not come under this pressure."""
        if pressure.stage < REFUSED[tier]:
            return
        share_after = LEAVES_AT[REFUSED[tier]]
        message = f"Overload: tasks of the tier {tier} are refused until less waits (stage {STAGES[pressure.stage]})"
        raise self._refusal(
            queue, pressure.tokens * max(0.0, 1 - share_after / max(pressure.share, share_after)), message, SHARED
        )

    async def full(self, error: QueueFull, queue: str, tier: str, tokens: int) -> Problem:
        """The refusal for what ADMIT refused. `tokens`: KV tokens that the task may need."""
        pressure = await self._look(queue)  # a key or tenant may have a bound where the gateway has none
        size = pressure.tokens / pressure.tasks if pressure.tasks else tokens
        code, whose = SAID[error.bound]
        there = f" for the tier {tier}" if code == SHARED else ""
        message = f"The queue is full{there}: of tasks {whose}, {error.limit} may wait"
        return self._refusal(queue, (error.waiting + 1 - error.limit) * size, message, code)

    def _refusal(self, queue: str, tokens: float, message: str, code: str) -> Problem:
        """`tokens`: those that have to be started before there is a place. Whoever has reached a bound of its own
        stands in nobody's way."""
        state, now, seconds = self._queues.setdefault(queue, _Queue()), time.monotonic(), LONGEST_S
        if state.pressure.served:
            line = max(state.line, now) if code == SHARED else now
            line = min(line + tokens / state.pressure.rate, now + LONGEST_S)
            state.line = line if code == SHARED else state.line
            seconds = max(SHORTEST_S, line - now)
        seconds *= random.uniform(1.0, 1.25)  # noqa: S311 - spreads retries of callers refused together
        headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(int(seconds * 1000))}
        return Problem(
            429, f"{message}; try again in {seconds:.1f} s", code=code, headers=headers | {"x-should-retry": "true"}
        )

    async def _measured(self, queue: str, store: Redis) -> Pressure:
        try:
            async with asyncio.timeout(SILENT_S):
                return await waiting.pressure(store, queue, self._bounds, self._max_wait)
        except FAILURES:
            return Pressure()
