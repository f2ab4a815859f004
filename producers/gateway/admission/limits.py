"""How much may wait: past a bound, a task is refused with 429 before anything of it is written.

A queue without a bound keeps all it is given and answers nobody in time. What waits is counted at each submit, in one
round trip to the broker that serves all submits of the moment; what this gateway has let in since is added. Gateways do
not ask each other, so that the bound may be passed by what they let in within one such moment.

Lower tiers are refused first, so that a backlog of theirs leaves room for the others; the priority tier, which waits
for none of them, is bounded by itself alone. Who is refused is told to come again when there will be a place, by how
fast tasks were taken from the broker while some waited, and after those who were told so before: else all would come at
once, and a gateway under more load would do nothing but refuse.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.contract.task import Task
from producers.errors import shown
from producers.gateway.http.errors import Problem

#: Of the bound, how much a tier may find taken: by all tiers, for the priority tier by itself. Never less than one
#: task, so that a small bound refuses no tier where nothing waits.
PARTS: Final = {"priority": 1.0, "default": 0.95, "flex": 0.8, "batch": 0.6}
#: A count is used for so long (s).
FRESH_S: Final = 0.05
#: The rate at which tasks are taken is that of the last so many seconds in which some waited, the older the less.
RATE_S: Final = 20.0
#: What is assumed where nothing was seen yet: tasks a second, as if seen for so long (s).
USUAL_RATE, USUAL_S = 10.0, 2.0
#: Something waits at each look; between two that are further apart (s) the queue may have been empty all the same.
APART_S: Final = 5.0
#: Bounds on what a caller is told to wait (s); the upper one also where no worker serves the queue.
SHORTEST_S, LONGEST_S = 0.25, 30.0


@dataclass(slots=True)
class _Count:
    at: float = -math.inf
    waiting: dict[str, int] = field(default_factory=dict)
    """By tier."""
    tenants: dict[str, int] = field(default_factory=dict)
    served: bool = False
    """A worker takes from this queue."""
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
        self._looked: tuple[float, int, bool] | None = None
        """When the last look was, what had been taken by then, and whether anything waited."""
        self._away = False
        self._taken, self._took_s = USUAL_RATE * USUAL_S, USUAL_S

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
                count.waiting, count.served = await self._waiting(queue)
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
        if count.served:
            need = (waiting + more - most) * self._took_s / max(self._taken, 1e-9)
            count.line = min(max(count.line, now) + need, now + LONGEST_S)
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

    async def _waiting(self, queue: str) -> tuple[dict[str, int], bool]:
        """Tasks of each tier of a pool, and whether a worker serves it. Measures how fast tasks are taken, from all
        queues of the broker. A broker that does not answer is submit's to tell of."""
        try:
            async with asyncio.timeout(SILENT_S):
                found = await self._client.broker.waiting(queue)
        except FAILURES:
            self._away = True
            return {}, False
        self._away = False
        self._measure(found.taken, any(found.tiers.values()))
        return found.tiers, found.served

    def _measure(self, taken: int, waits: bool) -> None:
        """Time in which nothing waited says nothing of how fast workers are: it is passed over."""
        now = time.monotonic()
        before, self._looked = self._looked, (now, taken, waits)
        if before is None or taken < before[1]:  # the broker was emptied
            return
        took = now - before[0]
        if waits and before[2] and took <= APART_S:
            kept = math.exp(-took / RATE_S)
            self._taken = self._taken * kept + taken - before[1]
            self._took_s = self._took_s * kept + took

    async def _waiting_of(self, queue: str, tenant: str) -> int:
        """As far as workers have sorted what waits."""
        if self._away:  # a moment ago: not each tenant has to wait for that
            return 0
        try:
            async with asyncio.timeout(SILENT_S):
                return await self._client.broker.waiting_of(queue, tenant)
        except FAILURES:
            self._away = True
            return 0
