"""The routes of `/v1/tasks`: submit, list, get, stream, cancel, retry, delete.

Also the parameters of a list, and the header `Prefer: wait=N` (RFC 7240): the answer waits for the task's end, up to N
seconds. With `Prefer: wait=N, explain` it comes before, once it is known what keeps the task from beginning.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, Self, get_args

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.datastructures import Headers

from producers.client.aio import AsyncHandle
from producers.client.listing import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    MAX_SCANNED,
    UNREADABLE,
    Listed,
    Listing,
    Order,
    Query,
    Status,
    list_tasks,
)
from producers.client.operations import chunk_tasks, repeated
from producers.client.steps import FAILURES
from producers.client.submission import TASK
from producers.connection.log_throttle import warn_throttled
from producers.contract import keys
from producers.contract.fields import MAX_TENANT
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import PenstockError, shown
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.fair_share import in_thread, measured
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import CANCELS, READS, SUBMITS_TASKS, principal_of, same
from producers.gateway.http.authorization import PARAMETER as TENANT_PARAMETER
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_body import query_parameters, query_schema, read_task
from producers.gateway.http.sse import watch, why_stopped
from producers.gateway.tasks import outcome
from producers.gateway.tasks.ownership import audit_operator, cancelled, foreign_tenant, owned, task_of
from producers.gateway.tasks.submit import encoded, submitted, submitted_view
from producers.gateway.tasks.views import Cancelled, Deleted, EtaView, TaskList, TaskView, errors
from producers.store.access.api_keys import Principal

log = logging.getLogger(__name__)

_NAME: Final = {"type": "string", "minLength": 1, "maxLength": MAX_TENANT}
_TIME: Final = {"type": "number", "minimum": 0, "maximum": 10**12}
#: Parameter -> its JSON schema and what it says.
_QUERY: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "kind": (
        {"enum": list(get_args(Listing)), "default": "task"},
        "task: of /v1/tasks and the client; request: of OpenAI's endpoints; response: in the background",
    ),
    "status": ({"enum": list(get_args(Status))}, ""),
    "model": (_NAME, ""),
    "tier": ({"enum": list(keys.TIERS)}, ""),
    "tenant": (_NAME, ""),
    "created_after": (_TIME, "unix seconds; later tasks alone"),
    "created_before": (_TIME, "unix seconds; earlier tasks alone"),
    "limit": (
        {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
        "most tasks in the answer",
    ),
    "order": ({"enum": list(get_args(Order)), "default": "desc"}, "by time of submission; desc: the latest first"),
    "after": (
        {"type": "string", "minLength": 1, "maxLength": 128},
        "the `last_id` of an earlier answer, or a task's id",
    ),
}
_PAIRS: Final = {
    "type": "object",
    "maxProperties": 16,
    "propertyNames": {"minLength": 1, "maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
#: The parameters for OpenAPI.
LIST_PARAMETERS: Final[list[dict[str, Any]]] = [
    *(query_schema(name, description, **schema) for name, (schema, description) in _QUERY.items()),
    {
        "name": "metadata",
        "in": "query",
        "style": "deepObject",
        "explode": True,
        "schema": _PAIRS,
        "description": f"metadata[name]=value: tasks with this pair. "
        f"One call looks at some {MAX_SCANNED} tasks at most.",
    },
]
#: Longest wait (s); who asks for more waits for this long.
LONGEST_S: Final = 60
#: Time (s) after which a caller who prefers `explain` is told what a task waits for that has not begun.
EXPLAIN_S: Final = 4.0
_WAIT: Final = re.compile(r"\s*wait\s*=\s*\"?([0-9]{1,200})\"?\s*(;.*)?", re.IGNORECASE)
_EXPLAIN: Final = re.compile(r"\s*explain\s*(=\s*\"\"\s*)?(;.*)?", re.IGNORECASE)
#: The header for OpenAPI.
PREFER: Final[dict[str, Any]] = {
    "name": "Prefer",
    "in": "header",
    "description": f"`wait=N`: answer at the task's end, or after N seconds, {LONGEST_S} at most; `wait=N, explain`: "
    "or within 5 seconds, with the reason, if the task has not begun",
    "schema": {"type": "string", "maxLength": 200},
}
router = APIRouter(prefix="/v1/tasks", tags=["tasks"])
#: The answer to a submit that waited for the task's end (`Prefer: wait`), for OpenAPI.
ENDED: Final[dict[str, Any]] = {"model": TaskView, "description": "The task ended while its caller waited."}


def read_query(request: Request, principal: Principal) -> Query:
    """Returns the caller's query, restricted to tasks that it may see.

    Raises Problem or InvalidQuery, also for a parameter that does not exist or is given twice.
    """
    query = query_parameters(request, _QUERY, "metadata")
    values: dict[str, Any] = {name: value for name, value in query.items() if name in _QUERY}
    metadata = {name[len("metadata[") : -1]: value for name, value in query.items() if name not in _QUERY}
    for name in ("created_after", "created_before", "limit"):
        if name in values:
            values[name] = _read_number(name, values[name])
    if not principal.sees_all:
        same(principal, values.get("tenant"), "tenant")
        values["tenant"] = principal.tenant
    return Query(**values, metadata=metadata)


def _read_number(name: str, value: str) -> int | float:
    try:
        if name == "limit" and value.isascii() and value.isdecimal() and len(value) < 10:
            return int(value)
        number = float(value)
    except ValueError:
        number = math.nan
    if name == "limit" or not math.isfinite(number):
        expected = f"an integer from 1 to {MAX_LIMIT}" if name == "limit" else "a time in unix seconds"
        raise invalid_value(name, f"{name} is {shown(value)}; it must be {expected}.")
    return number


def list_view(listed: Listed) -> TaskList:
    ids = [record.id for record in listed.records]
    return TaskList(
        data=[task for task in map(_readable, listed.records) if task is not None],
        first_id=ids[0] if ids else None,
        last_id=listed.next or (ids[-1] if ids else None),
        has_more=listed.more,
    )


def _readable(record: Record) -> TaskView | None:
    try:
        return TaskView.of(record)
    except ValueError as error:
        warn_throttled(log, UNREADABLE, record.id, error)
        return None


@dataclass(frozen=True, slots=True)
class Wait:
    """A preferred wait. `limit_s`: the longest. `explain`: shorter, once it is known what keeps the task."""

    limit_s: int
    explain: bool

    @classmethod
    def preferred(cls, headers: Headers) -> Self | None:
        """The wait that a request prefers, if it does. The RFC says to ignore a bad preference, and an unknown one."""
        parts = ",".join(headers.getlist("prefer")).split(",")
        limit = next((match[1] for part in parts if (match := _WAIT.fullmatch(part))), None)
        return None if limit is None else cls(min(int(limit), LONGEST_S), any(map(_EXPLAIN.fullmatch, parts)))

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the preferences which were applied."""
        return {"preference-applied": f"wait={self.limit_s}{', explain' if self.explain else ''}"}


async def enter_wait(request: Request, gateway: Gateway) -> Wait | None:
    """Returns the preferred wait. A request that waits is one of the gateway's streams from now on. Raises Problem if
    the gateway has no room for it, and as `Streams.enter`."""
    wait = Wait.preferred(request.headers)
    if wait is not None:
        await gateway.streams.enter(request.scope, "answer")
    return wait


async def _reason(request: Request, task_id: str) -> str:
    """The reason why a task waits; empty if it runs, has ended, or nobody can tell in time."""
    return await gateway_of(request).waits.text(task_id, whole=principal_of(request).may("read"))


def _with_reason(view: TaskView, reason: str) -> tuple[TaskView, dict[str, str]]:
    """A task that has not ended, and the answer's header, with what it waits for."""
    return (view.model_copy(update={"waits_for": reason}), {"penstock-waits-for": reason}) if reason else (view, {})


async def wait_for_end(request: Request, gateway: Gateway, handle: AsyncHandle, wait: Wait) -> str:
    """Wait for the task's end, as long as `wait` says; less if the caller leaves, the gateway stops or the store fails.

    Returns what it waits for if it has not begun, where the wait ended for that. Raises Problem if the caller's key
    ends.
    """
    stop = await gateway.streams.enter(request.scope, "answer")
    leaving = asyncio.create_task(watch(request.receive, stop))
    end = asyncio.create_task(measured(_read_to_end, handle))
    give_up, reason = time.monotonic() + wait.limit_s, ""
    try:
        while (remaining := give_up - time.monotonic()) > 0 and not reason:
            pause = min(EXPLAIN_S, remaining) if wait.explain else remaining
            done, _ = await asyncio.wait((end, stop), timeout=pause, return_when="FIRST_COMPLETED")
            if done:
                break
            if wait.explain:
                reason = await _reason(request, handle.id)
    finally:
        leaving.cancel()
        if end.cancel():
            await asyncio.wait((end,))
    if (problem := why_stopped(stop)) is not None:
        raise problem
    return reason


async def _read_to_end(handle: AsyncHandle) -> None:
    with suppress(PenstockError, *FAILURES):
        async with aclosing(handle.batches()) as batches:
            async for _ in batches:
                pass


@router.post(
    "",
    dependencies=SUBMITS_TASKS,
    status_code=202,
    response_model=TaskView,
    responses={200: ENDED, **errors(404, 413, 415, 422, 429)},
    openapi_extra={
        "parameters": [idempotency.PARAMETER, PREFER, TENANT_PARAMETER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": Task.model_json_schema()}}},
    },
)
async def submit(request: Request) -> Response:
    """Submit a task. It is durable once this answers."""
    gateway = gateway_of(request)
    wait = await enter_wait(request, gateway)
    task = owned(request, await read_task(request, gateway.settings.max_body))
    request.state.tier = task.tier
    return await _accepted(request, await encoded(request, gateway, task), TASK, wait)


@router.get(
    "",
    dependencies=READS,
    response_model=TaskList,
    responses=errors(404),
    openapi_extra={"parameters": LIST_PARAMETERS},
)
async def list_all(request: Request) -> Response:
    """List tasks that were submitted here or by the Python client, or with `kind` others, without their outputs; the
    latest first."""
    gateway = gateway_of(request)
    page = await gateway.client.run(list_tasks(read_query(request, principal_of(request)), gateway.settings.patience))
    return _json(list_view(page))


@router.get(
    "/{task_id}",
    dependencies=READS,
    response_model=TaskView,
    responses=errors(404),
    openapi_extra={"parameters": [PREFER]},
)
async def look(request: Request, task_id: str) -> Response:
    """Get a task's state, and its outputs once it is final."""
    gateway = gateway_of(request)
    wait = await enter_wait(request, gateway)
    handle = await task_of(request, task_id)
    record, reason = await handle.status(), ""
    if wait is not None and not record.final:
        reason = await wait_for_end(request, gateway, handle, wait)
        record = await handle.status()
    headers = {} if wait is None else wait.headers
    if record.final:
        answer = await outcome.answer(gateway, handle, record)
    else:
        reason = reason or ("" if wait is None else await _reason(request, task_id))
        view, waits = _with_reason(TaskView.of(record), reason)
        eta = await gateway.estimates.eta(record)
        view.eta = None if eta is None else EtaView(p50_s=eta.p50_s, p90_s=eta.p90_s)
        answer, headers = _json(view), headers | waits
    answer.headers.update(headers)
    return answer


@router.post(
    "/{task_id}/retry",
    dependencies=SUBMITS_TASKS,
    status_code=202,
    response_model=TaskView,
    responses={200: ENDED, **errors(404, 409, 422, 429)},
    openapi_extra={"parameters": [idempotency.PARAMETER, PREFER]},
)
async def retry(request: Request, task_id: str) -> Response:
    """Submit a task that has ended once more, as a new task with the same fields, seed and webhook."""
    wait = await enter_wait(request, gateway_of(request))
    client = gateway_of(request).client
    record = await (await task_of(request, task_id)).status()
    other = await foreign_tenant(request, keys.task(task_id))
    chunks = await client.run(chunk_tasks(record, client.patience))
    task, more = await in_thread(repeated, record, chunks) if chunks else repeated(record)
    request.state.tier = task.tier
    idempotency.note_body(request, b"")
    # A text's tokens are not counted where no gateway submitted it.
    if await gateway_of(request).accounts.limited(request, task.tenant):
        task = await encoded(request, gateway_of(request), task)
    return await _accepted(request, task, more, wait, other)


@router.post("/{task_id}/cancel", dependencies=CANCELS, response_model=Cancelled, responses=errors(404))
async def cancel(request: Request, task_id: str) -> Response:
    """Cancel a task, and answer with the task.

    An accepted task ends `cancelled`: at once if no worker runs it, else within a step. Repeating it changes nothing.
    """
    gateway = gateway_of(request)
    handle = await task_of(request, task_id)
    other = await foreign_tenant(request, keys.task(task_id))
    accepted, record = await cancelled(handle)
    await audit_operator(request, "task.cancel", task_id, other if accepted else None)
    if record.final and principal_of(request).may("read"):
        return await outcome.answer(gateway, handle, record, accepted=accepted)
    view = Cancelled(accepted=accepted, **TaskView.of(record).model_dump())
    return Response(view.model_dump_json(), media_type="application/json")


@router.delete("/{task_id}", dependencies=CANCELS, response_model=Deleted, responses=errors(404, 409))
async def delete(request: Request, task_id: str) -> Response:
    """Delete a task and all that is stored of it; one that has not ended is cancelled first.

    Afterwards its id is unknown, and webhooks that were not sent yet are not sent any more.
    """
    handle = await task_of(request, task_id)
    other = await foreign_tenant(request, keys.task(task_id))
    await handle.delete()
    await audit_operator(request, "task.delete", task_id, other)
    return _json(Deleted(id=task_id))


async def _accepted(
    request: Request, task: Task, more: Mapping[str, str | int], wait: Wait | None, repeated_of: str | None = None
) -> Response:
    """Submit an encoded task and answer with it: 202, or 200 if it ended while the caller waited.

    `repeated_of`: the other tenant whose task an operator's key repeats.
    """
    gateway = gateway_of(request)
    task_id, record = await submitted(request, gateway, task, more)
    if record is None and repeated_of is not None:
        await audit_operator(request, "task.retry", str(more["retried_from"]), repeated_of)
    headers = {"location": f"/v1/tasks/{task_id}"} | (idempotency.REPLAYED if record is not None else {})
    reason = ""
    if wait is not None:
        handle = gateway.client.get(task_id)
        reason = await wait_for_end(request, gateway, handle, wait)
        headers |= wait.headers
        with suppress(Problem, PenstockError, *FAILURES):  # it is submitted, whatever the store answers now
            record = await handle.status()
            if record.final:
                answer = await outcome.answer(gateway, handle, record)
                answer.headers.update(headers)
                return answer
        reason = reason or await _reason(request, task_id)
    view = (
        submitted_view(task_id, task, more, getattr(request.state, "shortened_to", None))
        if record is None
        else TaskView.of(record)
    )
    view, waits = _with_reason(view, reason)
    return Response(view.model_dump_json(exclude_unset=record is None), 202, headers | waits, "application/json")


def _json(view: BaseModel) -> Response:
    return Response(view.model_dump_json(), media_type="application/json")
