"""The endpoints that batches are for, as the sweeper calls them (`producers.sweeper.batches.endpoint`).

body ─▶ read_line ─▶ task; the final record and its events ─▶ answer_line ─▶ body, or the error that a caller gets
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from engine.grammar.trial import stopped
from engine.text import Tokenizer
from producers.client.aio import AsyncClient
from producers.client.directory import ResolvedModel, encoding_of
from producers.client.steps import once
from producers.contract import model_fit
from producers.contract.record import Record
from producers.contract.stream import End
from producers.contract.task import Task
from producers.errors import BrokenRecord, InvalidTask, LimitReached, PenstockError, UnknownModel
from producers.gateway.admission.limits import Spent, charge_for, check_may_use, fitted, there
from producers.gateway.executor import Executor
from producers.gateway.http.errors import Problem, body_of, problem_of
from producers.gateway.http.request_state import Work
from producers.gateway.openai.batch_lines import (
    COMPLETIONS,
    answer_line,
    answer_pooled,
    in_words_of,
    read_line,
)
from producers.gateway.openai.completions import MAX_TOKENS
from producers.gateway.openai.pooling import ENDPOINTS as POOLED
from producers.gateway.openai.reasoning import (
    Reasoning,
    ReasoningModel,
    ReasoningRequest,
    opened_by,
    reasoning_model,
    refuse_where_none,
)
from producers.gateway.openai.tools import Calling, Tools, make_calling
from producers.gateway.tasks.foreground import problem_of_end
from producers.gateway.text.forms import Forms, Judge
from producers.gateway.text.prompts import Prompts, Templates
from producers.store.access import api_keys, tenants
from producers.store.access.api_keys import LOCAL, Account, Limits, Principal
from producers.store.fleet.routing import Selection
from producers.store.usage.limits import CODES, Charge, refused
from producers.store.usage.prices import Prices
from producers.sweeper.batches.endpoint import Answer, Finished, PlannedTask

logger = logging.getLogger(__name__)

#: A request's tier, unless it names another.
TIER: Final = "batch"
#: Threads that read lines, in turns of tenants: a line's form may take seconds (`producers.gateway.text.forms`).
THREADS: Final = 4
#: Time (s) after which no further line of a block is read: it goes on with the next block.
READ_S: Final = 10.0
#: The answer to a line that meets a fault of this program.
BROKEN: Final = Problem(500, "Something went wrong here; the sweeper's log says what.", code="internal")


class LineEndpoints:
    """Answers as the endpoints do, without HTTP. Call `close` after use."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._prompts = Prompts(client.store)
        self._templates = Templates(client.store)
        self._forms = Forms()
        self._threads = Executor("penstock-lines", THREADS)
        self._used_up = Spent()
        self.spent = _refused(LimitReached("The budget of this month is spent.", CODES["budget_tokens"], None))

    def close(self) -> None:
        self._prompts.close()
        self._templates.close()
        self._forms.close()
        self._threads.close()

    async def tasks(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        principal: Principal = LOCAL,
        tenant: str | None = None,
        prices: Prices | None = None,
        sticky: str | None = None,
    ) -> list[PlannedTask | Answer]:
        models: dict[str, ResolvedModel | UnknownModel] = {}
        for model in {str(body["model"]) for body in bodies}:
            try:
                named = Selection(sticky=sticky, tenant=tenant, tier="batch")
                models[model] = await self._client.resolve(model, named, withdrawn=True)  # the batch was begun
            except UnknownModel as error:
                models[model] = error
        accounts = await self._accounts(principal.key, tenant)
        if any(self._used_up.charge_of(account) is not None for account in accounts):
            return []
        calls = {
            model: await self._call_maker(resolved)
            for model, resolved in models.items()
            if any(body.get("tools") for body in bodies if body["model"] == model)
        }
        reasoners = {} if path == COMPLETIONS else {name: await self._reasoner(model) for name, model in models.items()}
        if path == COMPLETIONS:
            bodies = [_usual(body, [account.limits for account in accounts]) for body in bodies]

        def plan() -> list[_Planned | Answer]:
            planned: list[_Planned | Answer] = []
            until = time.monotonic() + READ_S
            for body in bodies:
                if planned and time.monotonic() >= until:
                    break
                forms = _LineForms(self._forms, first=not planned)
                try:
                    model = str(body["model"])
                    call = partial(_call, calls.get(model), forms.judge)
                    reason = partial(_reason, reasoners.get(model), models[model])
                    plan = _planned(path, body, models[model], forms, call, reason, principal, tenant)
                except _Later:
                    break
                planned.append(plan)
            return planned

        planned = await self._threads.run(plan, tenant=tenant or "")
        return [
            entry if isinstance(entry, Answer) else await self._within(accounts, entry, prices, path, body)
            for entry, body in zip(planned, bodies, strict=False)
        ]

    async def _call_maker(self, model: ResolvedModel | UnknownModel) -> _CallMaker | Problem | None:
        """Returns the function that makes a line's `Calling`, or the error of all lines with tools; None if those are
        refused anyway."""
        if isinstance(model, UnknownModel) or "chat" not in model.card["capabilities"]:
            return None
        try:
            template = await self._templates.with_tools(model.card)
            return _CallMaker(template, await self._prompts.tokenizer(model.card))
        except Problem as error:
            return error

    async def _reasoner(self, model: ResolvedModel | UnknownModel) -> _Reasoner | Problem | None:
        """Returns what makes a line's `Reasoning`, or the error of all lines that ask for some; None for a model that
        does not reason."""
        if isinstance(model, UnknownModel):
            return None
        work = _work([], None)
        try:
            reasons = await reasoning_model(self._templates, self._prompts, model.card)
            if reasons is None:
                return None
            opened = {}
            for variables in reasons.settlements():
                if (key := _key(variables)) not in opened:
                    opened[key] = await opened_by(self._templates, model.card, work, variables, reasons.marks)
            return _Reasoner(reasons, opened)
        except Problem as error:
            return error

    async def charge_refused(self, requests: int, principal: Principal, tenant: str | None) -> None:
        accounts = await self._accounts(principal.key, tenant)
        counting = [account for account in accounts if account.limits.rpm is not None]
        if not counting:
            return
        for _ in range(requests):
            answer = await self._client.run(once(refused(counting)))
            self._used_up.note(Charge(tuple(counting), answer=answer, counted=True))

    async def _accounts(self, key_id: str | None, tenant: str | None) -> list[Account]:
        """The accounts of a batch's key and tenant, with the limits that they have now."""
        key = None if key_id is None else await api_keys.get(self._client.store, key_id)
        of_tenant = None if tenant is None else tenants.account(tenant, await tenants.get(self._client.store, tenant))
        return there(None if key is None else key.principal().account, of_tenant)

    async def _within(
        self,
        accounts: Sequence[Account],
        planned: _Planned,
        prices: Prices | None,
        path: str,
        body: Mapping[str, Any],
    ) -> PlannedTask | Answer:
        """A line's task within limits, and its charge. Its text is counted here, as the gateway counts a caller's. Else
        that is left to the worker, unless the line has tools, which a worker does not know."""
        plan, template = planned.plan, planned.template
        if not accounts and not template:
            return plan
        task, card = plan.task, plan.resolved_model.card
        context, work = int(card["context_length"]), _work(accounts, task.tenant)
        try:
            if task.messages is not None:
                text = await self._templates.render(card, task.messages, work, **template)
                ids = await self._prompts.encode(card, text, work, special=False)
                task = task.model_copy(update={"prompt": ids, "messages": None})
            elif isinstance(task.prompt, str):
                task = task.model_copy(update={"prompt": await self._prompts.encode(card, task.prompt, work)})
            shortens = task.max_tokens is None and task.kind == "generate"
            for account in accounts:
                task = fitted(account, task, model_fit.room(card) if task.kind == "generate" else context)
            model_fit.check(task, card)
            charge = charge_for(accounts, card["name"], task.tier, prices)
            if charge is not None:
                charge.shortens = shortens
                charge.check(task.kv_tokens(context))
        except (Problem, InvalidTask) as error:
            return replace(_refused(in_words_of(path, body, error)), worked=work.done)
        except LimitReached as error:
            return replace(_refused(error), worked=work.done)
        return replace(plan, task=task, charge=charge)

    async def answers(self, path: str, finished: Sequence[Finished]) -> list[Answer]:
        if path in POOLED:
            records = {end.record.versioned_model: end.record for end in finished}
            cards = {name: await self._card(record) for name, record in records.items()}
            return await asyncio.to_thread(
                lambda: [_answer(path, end, None, cards[end.record.versioned_model]) for end in finished]
            )
        tokenizers: dict[tuple[str, str], Tokenizer | Answer | None] = {}
        for end in finished:
            if _scored(end) and (encoding := _encoding(end)) not in tokenizers:
                tokenizers[encoding] = await self._tokenizer(end.record)
        return await asyncio.to_thread(
            lambda: [_answer(path, end, tokenizers[_encoding(end)] if _scored(end) else None) for end in finished]
        )

    async def _card(self, record: Record) -> Mapping[str, Any] | None:
        """The card of the version that ran a line, or of its model; None if there is none any more."""
        try:
            return (await self._client.version_of(record)).card
        except UnknownModel:
            return None

    async def _tokenizer(self, record: Record) -> Tokenizer | Answer | None:
        """The tokenizer of the version that ran a line, or the error of all answers that need it; None if that version
        is not known any more, and its model has another tokenizer: log probabilities are left out then."""
        try:
            resolved = await self._client.version_of(record)
            reads = resolved.reads(encoding_of(record.fields))
            return await self._prompts.tokenizer(resolved.card) if reads else None
        except (PenstockError, Problem) as error:
            return _refused(error)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A line's task, and variables of its chat template that no worker has."""

    plan: PlannedTask
    template: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _CallMaker:
    """Makes a model's way to call tools. `template`: its chat template's text."""

    template: str
    tokenizer: Tokenizer

    def make(self, tools: Tools, judge: Judge, without: Sequence[str]) -> Calling:
        return make_calling(tools, self.template, self.tokenizer, judge, without)


def _call(maker: _CallMaker | Problem | None, judge: Judge, tools: Tools, without: Sequence[str]) -> Calling:
    """The model's way to call a line's tools. Raises Problem, InvalidTask and _Later."""
    if isinstance(maker, Problem):
        raise maker
    assert maker is not None  # the model has a template, as has been checked
    return maker.make(tools, judge, without)


@dataclass(frozen=True, slots=True)
class _Reasoner:
    """A model's way to reason. `opened`: whether prompts begin the reasoning, by the template's variables."""

    model: ReasoningModel
    opened: Mapping[str, bool | None]


def _key(variables: Mapping[str, Any]) -> str:
    return json.dumps(variables, sort_keys=True)


def _reason(
    reasoner: _Reasoner | Problem | None, model: ResolvedModel | UnknownModel, request: ReasoningRequest
) -> Reasoning | None:
    """The model's way to reason on a line. Raises Problem."""
    if isinstance(reasoner, _Reasoner):
        variables, _ = reasoner.model.settled(request)
        return reasoner.model.reasoning(request, reasoner.opened[_key(variables)])
    if request.parameter is not None:
        if isinstance(reasoner, Problem):
            raise reasoner
        if isinstance(model, ResolvedModel):
            refuse_where_none(request, model.card)
    return None


class _Later(Exception):
    """The line's form needs a trial, which may take seconds: it begins the next block."""


class _LineForms:
    """Checks the form of a line. A trial for a line that a limit refuses would be wasted, and not counted. So only the
    form of a block's `first` line is tried. `worked`: it was tried."""

    def __init__(self, forms: Forms, *, first: bool) -> None:
        self._forms = forms
        self._first = first
        self._until = math.inf
        self.worked = False

    def check(self, task: Task) -> None:
        """Raises InvalidTask, and _Later."""
        if not self._forms.needs_no_trial(task):
            self._begin_trial()
        self._forms.check_now(task)

    def judge(self, name: str, text: str) -> None:
        """Judge the form of a tool's arguments. Raises RequestError, also where those of all tools take too long, and
        _Later."""
        if not self._forms.is_judged(name, text):
            self._begin_trial()
            if time.monotonic() >= self._until:
                raise stopped(name, f"the forms of the line's tools were not read within {READ_S:g} s")
        self._forms.judge_now(name, text)

    def _begin_trial(self) -> None:
        if not self._first:
            raise _Later
        if not self.worked:
            self._until = time.monotonic() + READ_S
        self.worked = True


def _work(accounts: Sequence[Account], tenant: str | None) -> Work:
    """The work on a line."""

    async def limited() -> Sequence[Account]:
        return accounts

    return Work(tenant or "", limited)


def _usual(body: Mapping[str, Any], limits: Sequence[Limits]) -> Mapping[str, Any]:
    """Returns a completion's body. Without max_tokens it gets the default, as far as the limits allow."""
    max_output = min((limit.max_output for limit in limits if limit.max_output is not None), default=MAX_TOKENS)
    return body if body.get("max_tokens") is not None else {**body, "max_tokens": min(MAX_TOKENS, max_output)}


def _planned(
    path: str,
    body: Mapping[str, Any],
    model: ResolvedModel | UnknownModel,
    forms: _LineForms,
    call: Callable[[Tools, Sequence[str]], Calling],
    reason: Callable[[ReasoningRequest], Reasoning | None],
    principal: Principal,
    tenant: str | None,
) -> _Planned | Answer:
    if isinstance(model, UnknownModel):
        return _refused(model, principal)
    fields = {"tier": TIER} if body.get("service_tier") in (None, "auto") else {}
    try:
        line = read_line(path, body, model.card, model.now_ms(), forms.check, call, reason, **fields, tenant=tenant)
        check_may_use(principal, line.task)
    except (Problem, InvalidTask) as error:
        return replace(_refused(error), worked=forms.worked)
    except _Later:
        raise
    except Exception:  # a bug here is the line's error: it must not hold up the batch for ever
        logger.exception("a line of a batch for %s cannot be read", path)
        return _refused(BROKEN)
    return _Planned(PlannedTask(line.task, model, line.more), line.template)


def _answer(
    path: str, finished: Finished, tokenizer: Tokenizer | Answer | None, card: Mapping[str, Any] | None = None
) -> Answer:
    """Returns the answer to a line. `tokenizer`: given if the task has log probabilities. `card`: that the model has
    now, if it generates nothing: another version's labels are not those of the line."""
    end = finished.events[-1]
    try:
        if isinstance(end, End) and (problem := problem_of_end(end)) is not None:
            return _refused(in_words_of(path, finished.body, problem))
        if isinstance(tokenizer, Answer):
            return tokenizer
        if path in POOLED:
            record = finished.record
            if card is None or card["version"] != record.fields.get("version"):
                card = {"name": record.model}
            return Answer(200, answer_pooled(path, finished.body, record, finished.events, card))
        body = _ascii(answer_line(path, finished.record, finished.events, tokenizer))
        return Answer(200, body, warning=finished.record.fields.get("warning", ""))
    except Exception:  # as above
        logger.exception("task %s of a batch cannot be answered", finished.record.id)
        return _refused(BROKEN)


def _encoding(finished: Finished) -> tuple[str, str]:
    """The version that ran a line, and what made its token ids."""
    return finished.record.versioned_model, encoding_of(finished.record.fields)


def _scored(finished: Finished) -> bool:
    try:
        return finished.record.task.get("logprobs") is not None
    except BrokenRecord:  # `_answer` has its error
        return False


def _refused(error: Exception, principal: Principal = LOCAL) -> Answer:
    problem = problem_of(error, principal)
    return Answer(problem.status, json.dumps(body_of(problem)).encode())


def _ascii(body: bytes) -> bytes:
    """The same JSON in ASCII: many readers also end a line at U+2028 and the like."""
    return body if body.isascii() else json.dumps(json.loads(body)).encode()
