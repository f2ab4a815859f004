"""Limits on waiting tasks: beyond a limit, a task is refused with 429 before anything is written.

A queue without a limit accepts everything and answers nobody in time. Waiting tasks are counted at each submit, in one
round trip to the broker that serves all submits of that moment. Tasks that this gateway has admitted since are added.
Gateways do not ask each other, so together they may exceed a limit by what they admit within one such moment.

Lower tiers are refused first, so that their backlog leaves places for others. The priority tier waits for no other
tier, and only its own tasks count against it. A refused caller is told when to try again: when a place will be free,
and after callers that were refused before. Otherwise all would retry at once, and a busy gateway would do nothing but
refuse. A place is free once the tasks before it were taken: their tokens, by the size of those that are next, at the
speed at which tokens were taken from the broker.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.contract.task import Task
from producers.errors import shown
from producers.gateway.http.errors import Problem
from producers.store.access.principal import Principal

#: Tier -> share of the limit that may be taken, by all tiers or, for priority, by its own tasks. It is at least one
#: task, so that a small limit refuses no tier while nothing waits.
PARTS: Final = {"priority": 1.0, "default": 0.95, "flex": 0.8, "batch": 0.6}
#: Time (s) for which a count is used.
FRESH_S: Final = 0.05
#: Time constant (s) of the average rate at which tokens are taken; only times with waiting tasks count.
RATE_S: Final = 20.0
#: The initial rate (KV tokens a second), with the weight of an observation of USUAL_S seconds.
USUAL_RATE, USUAL_S = 2_500.0, 2.0
#: Messages of each list whose size stands for that of all.
SAMPLE: Final = 8
#: Longest time (s) between two looks in which the queue counts as never empty, if tasks waited at both.
APART_S: Final = 5.0
#: Shortest and longest wait (s) that a refused caller is told. Without a worker it is the longest.
SHORTEST_S, LONGEST_S = 0.25, 30.0


@dataclass(slots=True)
class _Count:
    at: float = -math.inf
    waiting: dict[str, int] = field(default_factory=dict)
    """Tier -> waiting tasks."""
    tenants: dict[str, int] = field(default_factory=dict)
    served: bool = False
    """Whether a worker serves the queue."""
    size: float | None = None
    """Mean KV tokens of the tasks that are next; None where that was not asked since the last count."""
    line: float = -math.inf
    """Expected time at which the last refused caller gets a place, at the current rate."""
    counting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Admission:
    """The admission limits of one gateway; None: no limit."""

    def __init__(self, client: AsyncClient, max_queued: int | None, max_queued_per_tenant: int | None) -> None:
        self._client = client
        self._most = max_queued
        self._most_of_one = max_queued_per_tenant
        self._counts: dict[str, _Count] = {}
        self._looked: tuple[float, int, bool] | None = None
        """The last look: its time, the tokens taken by then, and whether any task waited."""
        self._away = False
        self._taken, self._took_s = USUAL_RATE * USUAL_S, USUAL_S

    async def enter(self, principal: Principal, tasks: Sequence[Task]) -> None:
        """Admit a request's tasks and count them.

        Raises Problem: 403 for a model or tier that the key may not use, 429 if they are too many now, 400 if they
        always will be. Raises what `AsyncClient.known` does.
        """
        check_may_use(principal, tasks[0])
        if self._most is None and self._most_of_one is None:
            return
        known = await self._client.known(tasks[0].model)
        queue = known.queue
        tenant, tier = tasks[0].tenant or "", tasks[0].tier
        count = self._counts.setdefault(queue, _Count())
        async with count.counting:
            if time.monotonic() - count.at > FRESH_S:
                count.tenants.clear()
                count.size = None
                count.waiting, count.served = await self._waiting(queue)
                count.at = time.monotonic()
            if self._most_of_one is not None and tenant not in count.tenants:
                count.tenants[tenant] = await self._waiting_of(queue, tenant)
        for waiting, most, whose in self._limits(count, tier, tenant):
            if waiting + len(tasks) > most:
                size = await self._size(count, queue, tasks, int(known.card["context_length"]))
                raise self._refusal(count, waiting, len(tasks), most, tier, whose, size)
        if self._most_of_one is not None:
            count.tenants[tenant] += len(tasks)
        count.waiting[tier] = count.waiting.get(tier, 0) + len(tasks)

    def _limits(self, count: _Count, tier: str, tenant: str) -> Iterator[tuple[int, int, str | None]]:
        """The limits that hold for a task: what waits, the most that may, and the tenant that it is counted for."""
        if self._most is not None:
            others = count.waiting.values() if tier != "priority" else (count.waiting.get(tier, 0),)
            yield sum(others), max(1, int(self._most * PARTS[tier])), None
        if self._most_of_one is not None:
            yield count.tenants[tenant], self._most_of_one, tenant

    def _refusal(
        self, count: _Count, waiting: int, more: int, most: int, tier: str, tenant: str | None, size: float
    ) -> Problem:
        """`size`: mean KV tokens of a waiting task."""
        if more > most:  # a retry would not help
            return Problem(
                400,
                f"{more} prompts in one request, where {most} tasks may wait: send {most} at a time",
                code="array_above_max_length",
                param="prompt",
            )
        seconds, now = LONGEST_S, time.monotonic()
        if count.served:
            need = (waiting + more - most) * size * self._took_s / max(self._taken, 1e-9)
            count.line = min(max(count.line, now) + need, now + LONGEST_S)
            seconds = max(SHORTEST_S, count.line - now)
        seconds *= random.uniform(1.0, 1.25)  # noqa: S311 - spreads retries of callers refused together
        whose = (
            "of this model and tier"
            if tenant is None
            else f"of tenant {shown(tenant)}"
            if tenant
            else "without a tenant"
        )
        return Problem(
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
        """Tier -> waiting tasks of a version, and whether a worker serves it.

        It also measures how fast tokens are taken from all queues. If the broker does not answer, submit reports that.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                found = await self._client.broker.waiting(queue)
        except FAILURES:
            self._away = True
            return {}, False
        self._away = False
        self._measure(found.taken, any(found.tiers.values()))
        return found.tiers, found.served

    async def _size(self, count: _Count, queue: str, tasks: Sequence[Task], context_length: int) -> float:
        """Mean KV tokens of the tasks that are next in a queue; of the refused ones where none says its size."""
        if count.size is None:
            count.size = sum(task.kv_tokens(context_length) for task in tasks) / len(tasks)
            with suppress(*FAILURES):  # then the wait is a rougher estimate
                async with asyncio.timeout(SILENT_S):
                    messages, tokens = await self._client.broker.sizes(queue, SAMPLE)
                    count.size = tokens / messages if messages else count.size
        return count.size

    def _measure(self, taken: int, waits: bool) -> None:
        """Update the rate at which tokens are taken. Time in which nothing waited is skipped."""
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
        """A tenant's waiting tasks, as far as workers have sorted them by tenant."""
        if self._away:  # it did not answer just now: do not wait again for each tenant
            return 0
        try:
            async with asyncio.timeout(SILENT_S):
                return await self._client.broker.waiting_of(queue, tenant)
        except FAILURES:
            self._away = True
            return 0


def check_may_use(principal: Principal, task: Task) -> None:
    """Raise Problem where a request's tasks, all of one model and tier, are not the caller's to submit."""
    if not principal.may_use(task.model):
        raise Problem(
            403, f"This key may not use the model {shown(task.model)}.", code="model_not_allowed", param="model"
        )
    if not principal.may_use(task.model, [task.tier]):
        raise Problem(
            403,
            f"This key may not use the tier {task.tier}; it may use {', '.join(principal.tiers)}.",
            code="tier_not_allowed",
            param="tier",
        )
