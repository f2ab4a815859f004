"""Admission: whether a request's tasks may come now, and by which bounds the store decides of each.

    key's models and tiers ─▶ stage of overload: refused, or shortened ─▶ ADMIT: bounds on what waits
    a submit ─▶ PRESSURE, at most every PRESSURE_FRESH_S ─▶ stage ─▶ normal │ shed │ shorten │ priority
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

**Accounts** of a request: what its key and its tenant may use, and its tasks made to fit.

tasks ─▶ sized: within the largest prompt and output ─▶ the request's Charge ─▶ ADMIT (`producers.store.usage.limits`)
a minute's requests are known to be used up ─▶ check_spent: refused, before the body is read
refused after work ─▶ charge_refused: one more of a minute's requests

A tenant's limits are those that the store had at most FRESH_S ago. They hold for whoever submits as this tenant: all of
its keys together, and without keys, all who name it.

`Spent` notes accounts whose requests of this minute are used up, by the answers of ADMIT and REFUSED. Until the minute
ends, more requests are refused before their body is read, and without the store. The store alone decides what is
charged. A minute's requests only grow, so nothing is refused that ADMIT would let in; a limit that was raised meanwhile
goes before the note.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis
from starlette.requests import HTTPConnection

from engine.errors import ErrorText
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, Read, once, persistently
from producers.client.submission import TASK
from producers.connection.addresses import Network, Resolver, Unresolved, refusal
from producers.connection.connect import SILENT_S
from producers.contract import keys, model_fit
from producers.contract.levels import split
from producers.contract.task import Task
from producers.contract.webhook import Destination
from producers.errors import InvalidTask, PenstockError, QueueFull, shown
from producers.gateway.admission.authentication import FRESH_S
from producers.gateway.admission.authentication import KEPT as TENANTS
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import principal_of
from producers.gateway.http.errors import ONCE, Problem
from producers.gateway.http.request_state import Work, moved, resolve
from producers.gateway.lru_cache import LruCache
from producers.store import waiting
from producers.store.access import tenants
from producers.store.access.api_keys import KEPT, NO_LIMITS, Account, Limits, Principal
from producers.store.usage.limits import Charge, needed, refused
from producers.store.usage.prices import Prices
from producers.store.waiting import LEAVES_AT, REFUSED, SHORTENS, STAGES, Bounds, Pressure, Room

#: Most accounts that are noted; the one noted first makes room.
MAX_NOTED: Final = 10_000
#: The charge of a request that is refused before it is read: none of a minute's tokens.
NO_TOKENS: Final = json.dumps({"tokens": 0})


@dataclass(frozen=True, slots=True)
class _Minute:
    """An account's minute, until `until` (monotonic). `requests`: how many were charged. `tokens`: the remaining tokens
    of a minute, and the limit; -1: no such limit."""

    until: float
    requests: int
    tokens: tuple[int, int]


class Spent:
    """The accounts of one gateway's callers that are used up. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: OrderedDict[str, _Minute] = OrderedDict()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, charge: Charge | None) -> None:
        """Note the store's answer about a request's accounts, if it says which of them is used up."""
        if charge is None or not charge.answer or charge.answer[3] != 0 or (account := charge.used_up) is None:
            return
        _, _, wait_ms, _, _, *tokens = charge.answer
        self._noted.pop(account.name, None)
        minute = _Minute(self._clock() + wait_ms / 1000, account.limits.counted["rpm"], (tokens[0], tokens[1]))
        self._noted[account.name] = minute
        if len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)

    def charge_of(self, account: Account) -> Charge | None:
        """Returns the charge that ADMIT would refuse for one more task of this account, if that is noted; else None."""
        minute = self._noted.get(account.name)
        if minute is None:
            return None
        remaining_s = minute.until - self._clock()
        if remaining_s <= 0:
            del self._noted[account.name]
            return None
        rpm = account.limits.rpm
        if rpm is None or rpm > minute.requests:
            return None
        return Charge((account,), answer=["rpm", 0, max(1, int(remaining_s * 1000)), 0, rpm, *minute.tokens])


class Accounts:
    """The accounts of one gateway's callers. `kept`: limits of what is kept for a tenant that has none of its own."""

    def __init__(self, client: AsyncClient, prices: Prices | None, kept: Limits = NO_LIMITS) -> None:
        self._client = client
        self._prices = prices
        self._kept = kept
        self._tenants: LruCache[str, Limits] = LruCache(TENANTS, fresh=FRESH_S)
        self.spent: Final = Spent()

    async def check_spent(self, connection: HTTPConnection, tenant: str | None) -> None:
        """Refuse a request of a key or tenant that is known to have none left in this minute, as ADMIT would.

        One with an Idempotency-Key may be a replay, which costs nothing: it is let in if that key has made something,
        and `idempotency.note_body` refuses it if it is another request. Raises LimitReached, Problem,
        redis.exceptions.RedisError or OSError.
        """
        accounts = await self.limited(connection, tenant)
        charge = next(
            (spent_charge for account in accounts if (spent_charge := self.spent.charge_of(account)) is not None), None
        )
        if charge is None or await idempotency.may_replay(connection, self._client, tenant=tenant):
            return
        connection.scope["state"]["charge"] = charge
        charge.apply_answer("rpm", charge.answer, NO_TOKENS)

    async def charge_refused(self, connection: HTTPConnection, work: Work) -> None:
        """Count a request that is refused after work was done for it, or makes no task of a large body, unless ADMIT
        has. The store may be away: then nothing is counted."""
        state = connection.scope["state"]
        charge: Charge | None = state.get("charge")
        if charge is not None and charge.counted:
            return
        with suppress(*FAILURES, PenstockError, Problem):
            async with asyncio.timeout(SILENT_S):
                accounts = [account for account in await work.limited() if account.limits.rpm is not None]
                if not accounts:
                    return
                answer = await self._client.run(once(refused(accounts)))
                state["charge"] = charge = Charge(tuple(accounts), answer=answer, counted=True)
                self.spent.note(charge)

    async def sized(self, connection: HTTPConnection, tasks: Sequence[Task]) -> list[Task]:
        """Fit tasks within their key's and tenant's largest prompt and output, before their Idempotency-Key is taken.
        They are charged to the accounts of both. A task that names no largest output may be shortened by a budget.
        Tasks that an earlier request of the key made pass unchanged: they are not made again.

        Raises Problem (400, 403), redis.exceptions.RedisError or OSError, and what `AsyncClient.resolve` does.
        """
        try:
            return await self._sized(connection, tasks)
        except Problem:
            if await idempotency.was_made(connection, self._client, len(tasks), tenant=tasks[0].tenant):
                return [*tasks]
            raise

    async def _sized(self, connection: HTTPConnection, tasks: Sequence[Task]) -> list[Task]:
        tenant = tasks[0].tenant
        state = connection.scope["state"]
        state["tenant_limits"] = limits = await self.limits_of(tenant)
        accounts = there(principal_of(connection).account, tenants.account(tenant or "", limits))
        if not accounts:
            return [*tasks]
        context = 0  # looked up only if it is needed, since each request would pay for it
        bound = "max_output" if tasks[0].kind == "generate" else "max_prompt"
        if tasks[0].max_tokens is None and any(getattr(limited.limits, bound) is not None for limited in accounts):
            card = (await resolve(connection, self._client, tasks[0])).card
            context = model_fit.room(card) if bound == "max_output" else int(card["context_length"])
        charge: Charge | None = state.get("charge")
        if charge is None:
            name = tasks[0].model
            if any(account.limits.budget_money is not None for account in accounts):
                name = (await resolve(connection, self._client, tasks[0])).card["name"]  # BASE:NAME is the adapter NAME
            state["charge"] = charge = charge_for(accounts, name, tasks[0].tier, self._prices)
        if charge is not None and tasks[0].max_tokens is None:
            charge.shortens = True
        at_once = len(tasks) > 1 and idempotency.HEADER not in connection.headers  # else the next try completes them
        for account in accounts:
            if at_once:
                check_number(account, len(tasks))
            if account.limits.size_tasks:
                tasks = [fitted(account, task, context) for task in tasks]
        if charge is not None and at_once:
            check_sum(charge, tasks, (await resolve(connection, self._client, tasks[0])).card)
        return [*tasks]

    async def limited(self, connection: HTTPConnection, tenant: str | None) -> list[Account]:
        """The accounts of the caller's key and of its tenant (`there`). Raises redis.exceptions.RedisError or
        OSError."""
        account = tenants.account(tenant or "", await self.limits_of(tenant))
        return there(principal_of(connection).account, account)

    async def kept(self, tenant: str | None) -> Limits:
        """The limits of what is kept for a tenant: its own, else the gateway's. Raises redis.exceptions.RedisError or
        OSError."""
        limits = await self.limits_of(tenant)
        tenant_limits = {name: getattr(limits, name) for name in KEPT}
        return replace(self._kept, **{name: limit for name, limit in tenant_limits.items() if limit is not None})

    async def limits_of(self, tenant: str | None) -> Limits:
        """A tenant's limits. Raises redis.exceptions.RedisError or OSError."""
        return NO_LIMITS if tenant is None else await self._tenants.get(tenant, partial(self._read, tenant))

    async def _read(self, tenant: str) -> Limits:
        read = Read((("HGET", keys.TENANT_LIMITS, tenant),))
        (raw,) = await self._client.run(persistently(read, self._client.patience))
        return tenants.parse(raw)


def there(key: Account | None, tenant: Account | None) -> list[Account]:
    """Returns the accounts of a key and its tenant that have limits, the one of the smaller output first."""
    accounts = [account for account in (key, tenant) if account is not None]
    return sorted(accounts, key=lambda account: account.limits.max_output or 2**62) if len(accounts) > 1 else accounts


def rates(prices: Prices | None, model: str, tier: str) -> tuple[tuple[int, ...], str]:
    """Returns the cost of a task's tokens that are charged to a budget in money, and its currency. Raises Problem if
    there is no price: nothing runs for free by mistake."""
    if prices is not None and (token_rates := prices.rates(model, tier)) is not None:
        return token_rates, prices.currency
    message = f"The budget is in money, and this gateway has no price of {shown(model)} in the tier {tier}"
    raise Problem(403, f"{message} (`penstock gateway --prices`).", code="model_not_priced", param="model")


def charge_for(accounts: Sequence[Account], model: str, tier: str, prices: Prices | None) -> Charge | None:
    """The charge of tasks of a model, by its card's name, and a tier, to those of the accounts whose limits count.
    Raises Problem as `rates` does."""
    counting = tuple([account for account in accounts if account.limits.counted])
    if not counting:
        return None
    charge = Charge(counting)
    for account in counting:
        if account.limits.budget_money is not None:
            charge.rates, charge.currency = rates(prices, model, tier)
    return charge


def check_number(account: Account, tasks: int) -> None:
    """Raise Problem (400) for more tasks than a request can ever have within these limits: a retry would not help."""
    limits = account.limits
    max_tasks = min((limit for limit in (limits.rpm, limits.max_in_flight) if limit is not None), default=tasks)
    if tasks > max_tasks:
        allowed = f"this {account.whose} may have {max_tasks} tasks"
        message = f"{tasks} prompts in one request, where {allowed}: send {max_tasks} at a time"
        raise Problem(400, message, code="array_above_max_length", param="prompt")


def check_sum(charge: Charge, tasks: Sequence[Task], card: Mapping[str, Any]) -> None:
    """Raise Problem (400) for tasks each of which fits into a minute's or a month's tokens, and all together never.

    The charge gets their sum, for the remainder of the month's tokens.
    """
    minute = [task.kv_tokens(int(card["context_length"])) for task in tasks]
    parts = [needed(task, card, charge.shortens) for task in tasks]
    month = [prompt + least * width for prompt, _, least, width in parts]
    prompts = sum(prompt for prompt, *_ in parts)
    charge.all = prompts, sum(month) - prompts
    for _, limits in charge.accounts:
        for each, limit in ((minute, limits.tpm), (month, limits.budget_tokens)):
            if limit is not None and max(each) <= limit < sum(each):
                message = (
                    f"{len(tasks)} prompts in one request may need {sum(each)} tokens, of {limit}: send fewer at a time"
                )
                raise Problem(400, message, code="array_above_max_length", param="prompt")


def fitted(account: Account, task: Task, context: int) -> Task:
    """The task within an account's largest prompt and output. Its own largest output, if it names none, is the
    account's, or what the model's context (tokens) leaves: of one that generates, `model_fit.room`.

    Raises Problem (400).
    """
    limits, prompt, output = account.limits, task.prompt_tokens, task.max_tokens
    if limits.max_prompt is not None and prompt is not None and prompt > limits.max_prompt:
        message = f"The prompt has {prompt} tokens; with this {account.whose} it may have {limits.max_prompt}."
        raise Problem(400, message, code="prompt_too_long", param="prompt" if task.kind == "generate" else "input")
    if task.kind != "generate":
        size = task.kv_tokens(context)
        if limits.max_prompt is not None and size > limits.max_prompt:
            message = (
                f"The texts have some {size} tokens in all; with this {account.whose} it may be {limits.max_prompt}."
            )
            raise Problem(400, message, code="prompt_too_long", param="input")
        return task
    if limits.max_output is None:
        return task
    if output is not None and output > limits.max_output:
        message = ErrorText.of(
            "{max_tokens} is {}; with this {} it may be {} at most.", output, account.whose, limits.max_output
        )
        raise Problem(400, message, code="output_too_long", param="max_tokens")
    if task.min_tokens > limits.max_output:
        bound = f"with this {account.whose} an output may have {limits.max_output} at most"
        message = f"min_tokens is {task.min_tokens}; {bound}."
        raise Problem(400, message, code="output_too_long", param="min_tokens")
    remaining = max(1, context - (prompt or 1))
    return task if output is not None else task.model_copy(update={"max_tokens": min(limits.max_output, remaining)})


logger = logging.getLogger(__name__)

#: Time (s) for which a look counts.
PRESSURE_FRESH_S: Final = 0.05
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
        """Returns the pressure of a queue, at most PRESSURE_FRESH_S old. While the store is away it is none: ADMIT will
        fail.

        `store`: another connection to the store than that for callers' requests.
        """
        return await self._look(queue, store) if self._bounded else Pressure()

    async def _look(self, queue: str, store: Redis | None = None) -> Pressure:
        state = self._queues.setdefault(queue, _Queue())
        if time.monotonic() - state.at <= PRESSURE_FRESH_S:
            return state.pressure
        async with state.looking:
            if time.monotonic() - state.at > PRESSURE_FRESH_S:  # else another looked meanwhile
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
        resolved = await resolve(request, self._client, tasks[0])
        # By its own name: a model's may have a colon, and another's behind it.
        if principal.models and resolved.card["name"] not in principal.models:
            raise _not_allowed(tasks[0].model)
        max_waiting = self._room(request).bounds.of(tasks[0].tier)
        count = sum(len(model_fit.chunks(task, resolved.card)) for task in tasks)
        if max_waiting and count > max_waiting:  # a retry would not help
            if count == len(tasks):
                message, param = f"send {max_waiting} at a time", "prompt"
            else:
                message, param = f"send its texts in requests of {max_waiting} such parts or fewer", "input"
            parts = f"{count} {'prompts' if param == 'prompt' else 'parts of texts'} in one request"
            message = f"{parts}, where {max_waiting} tasks may wait: {message}"
            raise Problem(400, message, code="array_above_max_length", param=param)
        pressure = await self.overload.look(resolved.queue)
        if pressure.stage:
            request.state.degraded = STAGES[pressure.stage]
        self.overload.check(pressure, resolved.queue, tasks[0].tier)
        if pressure.stage < SHORTENS or tasks[0].tier != "default" or principal.limits.shorten_to is None:
            return Entered([*tasks])
        entered = _shortened(tasks, principal.limits.shorten_to, model_fit.room(resolved.card))
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
            resolved, room = await resolve(request, self._client, task), self._room(request)
            follow = partial(moved, request, task.model)
            return (await self._client.admit(task, task_id, more, charge, room, resolved, follow)).id
        except QueueFull as error:
            if error.bound == "kept":
                raise _too_much_kept(error) from None
            model = await resolve(request, self._client, task)
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


def _shortened(tasks: Sequence[Task], to: int, room: int) -> Entered:
    """The tasks of a request with outputs of `to` tokens, where they may be longer. `room`: the model's
    (`model_fit.room`)."""
    first = tasks[0]
    if first.kind != "generate":
        return Entered([*tasks])
    to = max(to, first.min_tokens)
    if min(first.max_tokens or room, room - (first.prompt_tokens or 0)) <= to:
        return Entered([*tasks])
    cut = [task.model_copy(update={"max_tokens": to}) for task in tasks]
    return Entered(cut, {"shortened": json.dumps({"to": to, "from": first.max_tokens})}, to)


def check_sees(principal: Principal, model: str) -> None:
    """Raise Problem if the caller may not know of a model: for requests that submit no task."""
    if not principal.may_use(model.partition("@")[0]):
        message = f"There is no model {shown(model)} that this key may use."
        raise Problem(404, message, code="model_not_found", param="model")


def check_may_use(principal: Principal, task: Task, tier: str = "service_tier") -> None:
    """Raise Problem if the caller may not submit a request's tasks, all of one model and tier. `tier`: the parameter
    that names the tier."""
    check_may_use_model(principal, task.model)
    if not principal.may_use(task.model, [task.tier]):
        raise Problem(
            403,
            f"This key may not use the tier {task.tier}; it may use {', '.join(principal.tiers)}.",
            code="tier_not_allowed",
            param=tier,
        )


def check_may_use_model(principal: Principal, model: str) -> None:
    """Raise Problem if the caller may not use a model, whatever the tier: for requests that have none, such as to count
    tokens."""
    if not principal.may_use(model):
        raise _not_allowed(model)


def _not_allowed(model: str) -> Problem:
    return Problem(403, f"This key may not use the model {shown(model)}.", code="model_not_allowed", param="model")


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
