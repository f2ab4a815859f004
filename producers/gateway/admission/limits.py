"""Admission: whether a request's tasks may come now, and by which bounds the store decides of each.

    key's models and tiers ─▶ stage of overload: refused, or shortened ─▶ ADMIT: bounds on what waits

A queue without a bound accepts everything and answers nobody in time. ADMIT decides by counts in the store, in the
script that makes the record, so together all gateways never exceed a bound. Lower tiers are refused first, so that
their backlog leaves places for others. The priority tier waits for no other tier, and only its own tasks count
against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.submission import TASK
from producers.contract.task import Task
from producers.errors import QueueFull, shown
from producers.gateway.admission.overload import Overload
from producers.gateway.admission.resolved import resolve
from producers.gateway.admission.spent import Spent
from producers.gateway.http.authorization import principal_of
from producers.gateway.http.errors import ONCE, Problem
from producers.store.access.principal import NO_LIMITS, Limits, Principal
from producers.store.usage.limits import Charge
from producers.store.waiting import SHORTENS, STAGES, Bounds, Room


@dataclass(frozen=True, slots=True)
class Entered:
    """A request's tasks as they are submitted. `more`: fields of their records beside their own; `to`: the output
    tokens to which they were shortened."""

    tasks: list[Task]
    more: Mapping[str, str] = field(default_factory=dict)
    to: int | None = None


class Admission:
    """The admission of one gateway's callers. `spent`: hears what ADMIT says of accounts. `max_wait`: as of
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
            known = await resolve(request, self._client, task.model)
            tokens = task.kv_tokens(int(known.card["context_length"]))
            raise await self.overload.full(error, known.queue, task.tier, tokens) from None
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
    to = max(to, first.min_tokens)
    if min(first.max_tokens or context, context - (first.prompt_tokens or 0)) <= to:
        return Entered([*tasks])
    cut = [task.model_copy(update={"max_tokens": to}) for task in tasks]
    return Entered(cut, {"shortened": json.dumps({"to": to, "from": first.max_tokens})}, to)


def check_may_use(principal: Principal, task: Task, tier: str = "service_tier") -> None:
    """Raise Problem where a request's tasks, all of one model and tier, are not the caller's to submit. `tier`: the
    parameter that names the tier."""
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
