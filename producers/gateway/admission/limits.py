"""Admission: whether a request's tasks may come now, and by which bounds the store decides of each.

    key's models and tiers ─▶ stage of overload: refused, or shortened ─▶ ADMIT: bounds on what waits
    a submit ─▶ PRESSURE, at most every FRESH_S ─▶ stage ─▶ normal │ shed │ shorten │ priority
    ADMIT says `full` ──────────────────────────▶ 429, `Retry-After` by what waits and how fast it drains

A queue without a bound accepts everything and answers nobody in time. ADMIT decides by counts in the store, in the
script that makes the record, so together all gateways never exceed a bound. Lower tiers are refused first, so that
their backlog leaves places for others. The priority tier waits for no other tier, and only its own tasks count
against it.

The stage of overload is kept in the store (`producers.store.waiting`), so that all gateways see the same one. A refused
caller is told when a place will be free, after callers that were refused before: otherwise all would retry at once, and
a busy gateway would do nothing but refuse. A place is free once the tasks before it were started: their tokens, at the
rate at which workers started tokens.

`Destinations` refuses webhooks that may not be called, while their caller still waits for the answer. Their names may
resolve to other addresses later, so each delivery checks again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from redis.asyncio import Redis
from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.client.submission import TASK
from producers.connection.addresses import Network, Resolver, Unresolved, refusal
from producers.connection.connect import SILENT_S
from producers.contract.levels import split
from producers.contract.task import Task
from producers.contract.webhook import Destination
from producers.errors import InvalidTask, QueueFull, shown
from producers.gateway.admission.accounts import Spent
from producers.gateway.http.authorization import principal_of
from producers.gateway.http.errors import ONCE, Problem
from producers.gateway.http.request_state import resolve
from producers.store import waiting
from producers.store.access.principal import NO_LIMITS, Limits, Principal
from producers.store.usage.limits import Charge
from producers.store.waiting import LEAVES_AT, REFUSED, SHORTENS, STAGES, Bounds, Pressure, Room

logger = logging.getLogger(__name__)

#: Time (s) for which a look counts.
FRESH_S: Final = 0.05
#: Shortest and longest wait (s) that a refused caller is told. Without a worker it is the longest.
SHORTEST_S, LONGEST_S = 0.25, 30.0
#: Bound -> the code of a refusal, and whose tasks are too many.
QUEUE_FULL: Final = {
    "all": ("queue_full", "of all models"),
    "pool": ("queue_full", "of this model"),
    "tenant": ("tenant_queue_full", "of this tenant"),
    "key": ("key_queue_full", "of this key"),
}
#: The code of a refusal by what all callers share.
SHARED: Final = QUEUE_FULL["pool"][0]


@dataclass(slots=True)
class _Queue:
    """A queue's last look. `line`: when the last refused caller gets a place, at the current rate."""

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
        """Returns the pressure of a queue, at most FRESH_S old. While the store is away it is none: ADMIT will fail.

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
        """Returns queue -> pressure, for queues with waiting tasks and degraded ones; empty while the store is away.
        `store`: as in `look`."""
        try:
            async with asyncio.timeout(SILENT_S):
                names = {split(queue)[0] for queue in await waiting.queues(store)} - {""} if self._bounded else set()
        except FAILURES:
            return {}
        names |= {queue for queue, state in self._queues.items() if state.pressure.stage}
        return {queue: await self.look(queue, store) for queue in sorted(names)}

    def check(self, pressure: Pressure, queue: str, tier: str) -> None:
        """Raise Problem (429) if a tier's tasks are refused under this pressure."""
        if pressure.stage < REFUSED[tier]:
            return
        share_after = LEAVES_AT[REFUSED[tier]]
        message = f"Overload: tasks of the tier {tier} are refused until less waits (stage {STAGES[pressure.stage]})"
        raise self._refusal(
            queue, pressure.tokens * max(0.0, 1 - share_after / max(pressure.share, share_after)), message, SHARED
        )

    async def full(self, error: QueueFull, queue: str, tier: str, tokens: int) -> Problem:
        """Returns the answer for a task that ADMIT refused. `tokens`: KV tokens that the task may need."""
        pressure = await self._look(queue)  # a key or tenant may have a bound where the gateway has none
        size = pressure.tokens / pressure.tasks if pressure.tasks else tokens
        code, whose = QUEUE_FULL[error.bound]
        there = f" for the tier {tier}" if code == SHARED else ""
        message = f"The queue is full{there}: of tasks {whose}, {error.limit} may wait"
        return self._refusal(queue, (error.waiting + 1 - error.limit) * size, message, code)

    def _refusal(self, queue: str, tokens: float, message: str, code: str) -> Problem:
        """Returns the answer that names the time of the next try. `tokens`: those that have to be started before there
        is a place. A caller at its own bound delays no other caller."""
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


@dataclass(frozen=True, slots=True)
class Entered:
    """A request's tasks as they are submitted. `more`: fields of their records beside their own; `to`: the output
    tokens to which they were shortened."""

    tasks: list[Task]
    more: Mapping[str, str] = field(default_factory=dict)
    to: int | None = None


class Admission:
    """The admission of one gateway's callers. `spent`: notes ADMIT's answers about accounts. `max_wait`: as in
    `Overload`."""

    def __init__(self, client: AsyncClient, bounds: Bounds, spent: Spent, max_wait: float = 0.0) -> None:
        self._client = client
        self._spent = spent
        self._bounds = bounds
        self.overload = Overload(client.store, bounds, max_wait)

    async def enter(self, request: HTTPConnection, tasks: Sequence[Task]) -> Entered:
        """Check a request's tasks, all of one model and tier, before anything is written. The edge tells the caller
        of overload.

        Raises Problem: 403 for a model or tier that the key may not use, 429 if its tier is refused now, 400 if they
        always will be too many. Raises what `AsyncClient.resolve` does.
        """
        principal = principal_of(request)
        check_may_use(principal, tasks[0])
        max_waiting = self._room(request).bounds.of(tasks[0].tier)
        if max_waiting and len(tasks) > max_waiting:  # a retry would not help
            message = (
                f"{len(tasks)} prompts in one request, where {max_waiting} tasks may wait: send {max_waiting} at a time"
            )
            raise Problem(400, message, code="array_above_max_length", param="prompt")
        resolved = await resolve(request, self._client, tasks[0].model)
        pressure = await self.overload.look(resolved.queue)
        if pressure.stage:
            request.state.degraded = STAGES[pressure.stage]
        self.overload.check(pressure, resolved.queue, tasks[0].tier)
        if pressure.stage < SHORTENS or tasks[0].tier != "default" or principal.limits.shorten_to is None:
            return Entered([*tasks])
        entered = _shortened(tasks, principal.limits.shorten_to, int(resolved.card["context_length"]))
        request.state.shortened_to = entered.to
        return entered

    async def admit(
        self,
        request: HTTPConnection,
        task: Task,
        task_id: str | None,
        more: Mapping[str, str | int] = TASK,
        charge: Charge | None = None,
    ) -> str:
        """Submit a task within the bounds, and return its id. Raises Problem (429), and as `AsyncClient.admit`."""
        try:
            resolved = await resolve(request, self._client, task.model)
            return (await self._client.admit(task, task_id, more, charge, self._room(request), resolved)).id
        except QueueFull as error:
            if error.bound == "kept":
                raise _too_much_kept(error) from None
            model = await resolve(request, self._client, task.model)
            tokens = task.kv_tokens(int(model.card["context_length"]))
            raise await self.overload.full(error, model.queue, task.tier, tokens) from None
        finally:
            self._spent.note(charge)

    def _room(self, request: HTTPConnection) -> Room:
        """The bounds for a caller. A tenant's own goes before that of all tenants (`Accounts.sized` has it read)."""
        principal, bounds = principal_of(request), self._bounds
        if (max_waiting := principal.limits.max_waiting) is not None:
            bounds = replace(bounds, key=max_waiting)
        limits: Limits = getattr(request.state, "tenant_limits", NO_LIMITS)
        if limits.max_waiting is not None:
            bounds = replace(bounds, tenant=limits.max_waiting)
        if limits.max_task_bytes is not None:
            bounds = replace(bounds, kept=limits.max_task_bytes)
        return Room(bounds, principal.key)


def _too_much_kept(error: QueueFull) -> Problem:
    message = (
        f"The tasks and results of this tenant have {error.waiting} bytes in the store; at most {error.limit} are "
        "kept: delete some, give tasks a shorter ttl, or wait until they expire."
    )
    return Problem(429, message, code="too_many_task_bytes", headers=ONCE)


def _shortened(tasks: Sequence[Task], to: int, context: int) -> Entered:
    """The tasks of a request with outputs of `to` tokens, where they may be longer. `context`: the model's (tokens)."""
    first = tasks[0]
    if first.kind != "generate":
        return Entered([*tasks])
    to = max(to, first.min_tokens)
    if min(first.max_tokens or context, context - (first.prompt_tokens or 0)) <= to:
        return Entered([*tasks])
    cut = [task.model_copy(update={"max_tokens": to}) for task in tasks]
    return Entered(cut, {"shortened": json.dumps({"to": to, "from": first.max_tokens})}, to)


def check_sees(principal: Principal, model: str) -> None:
    """Raise Problem if the caller may not know of a model: for requests that submit no task."""
    if not principal.may_use(model):
        message = f"There is no model {shown(model)} that this key may use."
        raise Problem(404, message, code="model_not_found", param="model")


def check_may_use(principal: Principal, task: Task, tier: str = "service_tier") -> None:
    """Raise Problem if the caller may not submit a request's tasks, all of one model and tier. `tier`: the parameter
    that names the tier."""
    if not principal.may_use(task.model):
        raise Problem(
            403, f"This key may not use the model {shown(task.model)}.", code="model_not_allowed", param="model"
        )
    if not principal.may_use(task.model, [task.tier]):
        raise Problem(
            403,
            f"This key may not use the tier {task.tier}; it may use {', '.join(principal.tiers)}.",
            code="tier_not_allowed",
            param=tier,
        )


class Destinations:
    """The gateway's check of webhooks. `allowed`: networks whose addresses may be called though they are not public."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._resolver = Resolver()

    async def check(self, url: str, param: str) -> None:
        """Raises InvalidTask for a URL that does not resolve or may not be called. Its form was checked before."""
        destination = Destination.parse(url)
        try:
            addresses = await self._resolver.resolve(destination.host)
        except Unresolved as error:
            raise InvalidTask(f"{param} is {shown(url)}: {error}", param=param, code="webhook_refused") from None
        why = refusal(destination.scheme, destination.port, addresses, self._allowed)
        if why is not None:
            raise InvalidTask(f"{param} is {shown(url)}: {why}", param=param, code="webhook_refused")

    async def aclose(self) -> None:
        await self._resolver.aclose()
