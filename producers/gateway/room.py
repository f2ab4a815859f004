"""How much may wait: past a bound, a task is refused with 429 before anything of it is written.

A queue without a bound keeps all it is given and answers nobody in time. What waits is counted at each submit, in one
round trip to the broker that serves all submits of the moment; what this gateway has let in since is added. Gateways do
not ask each other, so that the bound may be passed by what they let in within one such moment.

Lower tiers are refused first, so that a backlog of theirs leaves room for the others; the priority tier, which waits
for none of them, is bounded by itself alone. Who is refused is told to come again when there will be a place, by how
fast tasks were taken from the broker of late, and after those who were told so before: else all would come at once, and
a gateway under more load would do nothing but refuse.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from producers import keys
from producers.aio import AsyncClient
from producers.connect import SILENT_S
from producers.gateway.errors import Problem
from producers.steps import FAILURES
from producers.task import Task, shown

#: Of the bound, how much a tier may find taken: by all tiers, for the priority tier by itself. Never less than one
#: task, so that a small bound refuses no tier where nothing waits.
PARTS: Final = {"priority": 1.0, "default": 0.95, "flex": 0.8, "batch": 0.6}
#: A count is used for so long (s).
FRESH_S: Final = 0.05
#: Over how long the rate at which tasks are taken is measured (s), at least.
RATE_S: Final = 1.0
#: Bounds on what a caller is told to wait (s); the upper one also where nothing is taken.
SHORTEST_S, LONGEST_S = 0.25, 30.0


@dataclass(slots=True)
class _Count:
    at: float = -math.inf
    waiting: dict[str, int] = field(default_factory=dict)
    """By tier."""
    tenants: dict[str, int] = field(default_factory=dict)
    line: float = -math.inf
    """When there will be a place for the last one that was told to come again, at the rate of late."""
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Room:
    """The bounds of one gateway; None: there is none."""

    def __init__(self, client: AsyncClient, max_queued: int | None, max_queued_per_tenant: int | None) -> None:
        self._client = client
        self._most = max_queued
        self._most_of_one = max_queued_per_tenant
        self._counts: dict[str, _Count] = {}
        self._taken: tuple[float, int] | None = None
        self._away = False
        self._rate = 0.0

    async def enter(self, tasks: Sequence[Task]) -> None:
        """Count them in. Raises Problem, 429 where they would be too many and 400 where they always will be, and what
        `AsyncClient.known` does."""
        if self._most is None and self._most_of_one is None:
            return
        queue = (await self._client.known(tasks[0].model)).queue
        tenant, tier = tasks[0].tenant or "", tasks[0].tier
        count = self._counts.setdefault(queue, _Count())
        async with count.counting:
            if time.monotonic() - count.at > FRESH_S:
                count.tenants.clear()
                count.waiting = await self._waiting(queue)
                count.at = time.monotonic()
            if self._most_of_one is not None and tenant not in count.tenants:
                count.tenants[tenant] = await self._waiting_of(queue, tenant)
        if self._most is not None:
            others = count.waiting.values() if tier != "priority" else (count.waiting.get(tier, 0),)
            self._check(count, sum(others), len(tasks), max(1, int(self._most * PARTS[tier])), tier, None)
        if self._most_of_one is not None:
            self._check(count, count.tenants[tenant], len(tasks), self._most_of_one, tier, tenant)
            count.tenants[tenant] += len(tasks)
        count.waiting[tier] = count.waiting.get(tier, 0) + len(tasks)

    def _check(self, count: _Count, waiting: int, more: int, most: int, tier: str, tenant: str | None) -> None:
        if waiting + more <= most:
            return
        if more > most:  # to come again would not help
            raise Problem(
                400,
                f"{more} prompts in one request, where {most} tasks may wait: send {most} at a time",
                code="array_above_max_length",
                param="prompt",
            )
        seconds, now = LONGEST_S, time.monotonic()
        if self._rate > 0:
            count.line = min(max(count.line, now) + (waiting + more - most) / self._rate, now + LONGEST_S)
            seconds = max(SHORTEST_S, count.line - now)
        seconds *= random.uniform(1.0, 1.25)  # noqa: S311 - those who were refused together should not come together
        whose = (
            "of this model and tier"
            if tenant is None
            else f"of tenant {shown(tenant)}"
            if tenant
            else "without a tenant"
        )
        raise Problem(
            429,
            f"The queue is full: of tasks {whose}, {most} may wait ({tier} is refused while more do); "
            f"try again in {seconds:.1f} s",
            code="queue_full" if tenant is None else "tenant_queue_full",
            headers={
                "retry-after": str(math.ceil(seconds)),
                "retry-after-ms": str(int(seconds * 1000)),
                "x-should-retry": "true",
            },
        )

    async def _waiting(self, queue: str) -> dict[str, int]:
        """Of each tier of a pool; and how fast tasks are taken, from all queues of the broker. A broker that does not
        answer is submit's to tell of."""
        names = [(tier, name) for tier in keys.TIERS for name in keys.tier_lists(queue, tier)]
        try:
            async with asyncio.timeout(SILENT_S), self._client.broker.pipeline(transaction=False) as pipe:
                for _, name in names:
                    pipe.execute_command("LLEN", name)
                    pipe.execute_command("ZCARD", keys.sorted_of(name))
                pipe.execute_command("GET", keys.DELIVERIES)
                *counts, taken = await pipe.execute()
        except FAILURES:
            self._away = True
            return {}
        self._away = False
        self._measure(int(taken or 0))
        waiting = dict.fromkeys(keys.TIERS, 0)
        for (tier, _), arrived, by_tenant in zip(names, counts[::2], counts[1::2], strict=True):
            waiting[tier] += arrived + by_tenant
        return waiting

    def _measure(self, taken: int) -> None:
        now = time.monotonic()
        if self._taken is None or taken < self._taken[1]:  # the broker was emptied
            self._taken = (now, taken)
        elif now - self._taken[0] >= RATE_S:
            self._rate = (taken - self._taken[1]) / (now - self._taken[0])
            self._taken = (now, taken)

    async def _waiting_of(self, queue: str, tenant: str) -> int:
        """As far as workers have sorted what waits."""
        if self._away:  # a moment ago: not each tenant has to wait for that
            return 0
        names = [name for tier in keys.TIERS for name in keys.tier_lists(queue, tier)]
        try:
            async with asyncio.timeout(SILENT_S), self._client.broker.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.execute_command("ZCARD", keys.turn(name, tenant))
                return sum(await pipe.execute())
        except FAILURES:
            self._away = True
            return 0
