"""Accounts of a request: what its key and its tenant may use, and its tasks made to fit.

tasks ─▶ sized: within the largest prompt and output ─▶ the request's Charge ─▶ ADMIT (`producers.store.usage.limits`)

A tenant's limits are those that the store had at most FRESH_S ago. They hold for whoever submits as this tenant: all of
its keys together, and where no keys are asked for, all who name it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import HTTPConnection

from producers.client.aio import AsyncClient
from producers.client.steps import Read, persistently
from producers.contract import keys
from producers.contract.task import Task
from producers.errors import shown
from producers.gateway.admission.callers import FRESH_S, KEPT
from producers.gateway.http import idempotency
from producers.gateway.http.caller import charge_of, principal_of
from producers.gateway.http.errors import Problem
from producers.store.access import tenants
from producers.store.access.principal import NO_LIMITS, Limits
from producers.store.usage.limits import Account, Charge
from producers.store.usage.prices import Prices


class Accounts:
    """The accounts of one gateway's callers."""

    def __init__(self, client: AsyncClient, prices: Prices | None) -> None:
        self._client = client
        self._prices = prices
        self._known: dict[str, tuple[Limits, float]] = {}

    async def sized(self, connection: HTTPConnection, tasks: Sequence[Task]) -> list[Task]:
        """The tasks within their key's and tenant's largest prompt and output, before their Idempotency-Key is taken.
        They are charged to the accounts of both. A task that names no largest output may be shortened by a budget.

        Raises Problem (400, 403), redis.exceptions.RedisError or OSError, and what `AsyncClient.known` does.
        """
        limits = await self.limits(connection, tasks[0].tenant)
        connection.state.max_waiting = dict(limits)["tenant"].max_waiting
        if not any(one != NO_LIMITS for _, one in limits):
            return [*tasks]
        context = 0  # it is asked for where it is needed, since each request would pay for it
        if tasks[0].max_tokens is None and any(one.max_output is not None for _, one in limits):
            context = int((await self._client.known(tasks[0].model)).card["context_length"])
        charge = charge_of(connection)
        if charge is None:
            charge = charge_for(limits, principal_of(connection).key, tasks[0], self._prices)
            connection.state.charge = charge
        if charge is not None and tasks[0].max_tokens is None:
            charge.shortens = True
        for whose, one in limits:
            if idempotency.HEADER not in connection.headers:  # else the next try completes them
                check_number(one, len(tasks), whose)
            tasks = [fitted(one, task, context, whose) for task in tasks]
        return [*tasks]

    async def limits(self, connection: HTTPConnection, tenant: str | None) -> list[tuple[str, Limits]]:
        """The limits of the caller's `key`, and of its `tenant`, each after its word, the smaller output first.

        Raises redis.exceptions.RedisError or OSError.
        """
        found = [("key", principal_of(connection).limits), ("tenant", await self._of(tenant))]
        return sorted(found, key=lambda one: one[1].max_output or 2**62)

    async def _of(self, tenant: str | None) -> Limits:
        if tenant is None:
            return NO_LIMITS
        known, now = self._known.get(tenant), time.monotonic()
        if known is not None and now - known[1] < FRESH_S:
            return known[0]
        read = Read((("HGET", keys.TENANT_LIMITS, tenant),))
        (raw,) = await self._client.run(persistently(read, self._client.patience))
        self._known.pop(tenant, None)
        self._known[tenant] = found = tenants.parse(raw), now
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return found[0]


def rates(prices: Prices | None, model: str, tier: str) -> tuple[tuple[int, ...], str]:
    """What a token of a task costs that is charged to a budget in money, and in which currency. Raises Problem where
    nobody has said it: nothing runs for free by mistake."""
    if prices is not None and (found := prices.rates(model, tier)) is not None:
        return found, prices.currency
    said = f"The budget is in money, and this gateway has no price of {shown(model)} in the tier {tier}"
    raise Problem(403, f"{said} (`penstock gateway --prices`).", code="model_not_priced", param="model")


def charge_for(
    limits: Sequence[tuple[str, Limits]], key: str | None, task: Task, prices: Prices | None
) -> Charge | None:
    """The charge of tasks like this one, to the accounts of a key and of the task's tenant, as far as they have limits
    that count. Raises Problem as `rates` does."""
    names = {"key": key or "", "tenant": f"tenant:{task.tenant}"}
    charge = Charge(tuple(Account(names[whose], one) for whose, one in limits if one.counted))
    if any(account.limits.budget_money is not None for account in charge.accounts):
        charge.rates, charge.currency = rates(prices, task.model, task.tier)
    return charge if charge.accounts else None


def check_number(limits: Limits, tasks: int, whose: str) -> None:
    """Raise Problem (400) for more tasks than a request can ever have within these limits: a retry would not help."""
    most = min((one for one in (limits.rpm, limits.max_in_flight) if one is not None), default=tasks)
    if tasks > most:
        said = f"{tasks} prompts in one request, where this {whose} may have {most} tasks: send {most} at a time"
        raise Problem(400, said, code="array_above_max_length", param="prompt")


def fitted(limits: Limits, task: Task, context: int, whose: str) -> Task:
    """The task within these limits' largest prompt and output. Its own largest output, if it names none, is theirs, or
    what the model's context (tokens) leaves.

    Raises Problem (400).
    """
    prompt, output = task.prompt_tokens, task.max_tokens
    if limits.max_prompt is not None and prompt is not None and prompt > limits.max_prompt:
        said = f"The prompt has {prompt} tokens; with this {whose} it may have {limits.max_prompt}."
        raise Problem(400, said, code="prompt_too_long", param="prompt")
    if limits.max_output is None:
        return task
    if output is not None and output > limits.max_output:
        said = f"max_tokens is {output}; with this {whose} it may be {limits.max_output} at most."
        raise Problem(400, said, code="output_too_long", param="max_tokens")
    left = max(1, context - (prompt or 1))
    return task if output is not None else task.model_copy(update={"max_tokens": min(limits.max_output, left)})
