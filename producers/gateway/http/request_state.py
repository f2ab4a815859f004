"""State that the gateway keeps of one request: the work done for it, the model that it names, and its trace.

Rendering, tokenizing and compiling cost everybody on this gateway something, and ADMIT charges only what it admits. So
`Work` says whose turn it is, by tenant (`producers.gateway.executor`), and a request that is refused after work is
charged all the same (`producers.gateway.admission.limits`).

`resolve` looks a model up once for each request: the prompt is made, the limits are checked and the tasks are submitted
for one version, also while a rollout switches to another.

The trace (`traceparent`) is passed on to every task that the request makes: the caller's, or where traces are turned
on the request's own span in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.types import Receive

from producers.client.aio import AsyncClient, AsyncHandle
from producers.client.directory import ResolvedModel, selection_of
from producers.client.submission import TASK
from producers.connection.logs import subject
from producers.contract.record import TraceParent, trace_fields, trace_id
from producers.contract.task import Task
from producers.gateway.http.authorization import tenant_of
from producers.gateway.http.request_span import RequestSpan
from producers.store.access.api_keys import Account
from producers.store.fleet.routing import Selection
from producers.store.usage.limits import Charge
from producers.store.waiting import Room
from producers.tracing.export import Tracer

#: A header with the key by which tasks stay with one version of a model whose tasks are split.
STICKY_HEADER: Final = "penstock-sticky"
#: Parameters of a body that say as much, the first one that it has.
STICKY: Final = ("conversation", "prompt_cache_key", "safety_identifier", "user")
#: Most characters of such a key that count.
MAX_STICKY: Final = 512

#: Most characters of what a caller is told of a request that is not followed in all.
MAX_WARNING: Final = 1000
#: The record's fields for the current request's trace. Every request has a context of its own.
_trace: Final[ContextVar[Mapping[str, str]]] = ContextVar("traceparent", default={})  # noqa: B039 - never changed


async def _none() -> Sequence[Account]:
    return ()


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class Work:
    """Work for one request.

    `tenant`: who takes a turn; "" if none is named. `limited`: the accounts of its key and tenant. `size`: the texts of
    the request have no more bytes (UTF-8); None if nobody has measured that. `form`: whether its outputs are to have a
    form. `caller_left`: returns once the caller has left, and is for after the body was read. `done`: some work was
    done. `warnings`: what of the request is not followed; a header of the answer tells it.
    """

    tenant: str = ""
    limited: Callable[[], Awaitable[Sequence[Account]]] = _none
    size: int | None = None
    form: bool = False
    caller_left: Callable[[], Awaitable[None]] = _never
    done: bool = False
    warnings: list[str] = field(default_factory=list)


def work_of(connection: HTTPConnection, tenant: str | None = None) -> Work:
    """The work of a request, at an endpoint that needs a scope. `tenant`: the one that its body names, if it names one.

    Raises Problem for a header that names no tenant.
    """
    state = connection.scope["state"]
    work: Work | None = state.get("work")
    if work is None:
        state["work"] = work = Work()
        if isinstance(connection, Request):
            work.caller_left = partial(_disconnected, connection.receive)
        _belong(work, connection, tenant or tenant_of(connection))
    elif tenant is not None and tenant != work.tenant:
        _belong(work, connection, tenant)
    return work


def _belong(work: Work, connection: HTTPConnection, tenant: str | None) -> None:
    work.tenant = tenant or ""
    work.limited = partial(connection.app.state.gateway.accounts.limited, connection, tenant)


async def resolve(
    connection: HTTPConnection, client: AsyncClient, task: Task, *, withdrawn: bool = False
) -> ResolvedModel:
    """Returns a task's model as this request resolved it first. Raises as `AsyncClient.resolve`."""
    resolved = _resolved(connection)
    if task.model not in resolved:
        headers = connection.headers
        sticky = headers.get(STICKY_HEADER) or connection.scope["state"].get("sticky") or headers.get("idempotency-key")
        selection = selection_of(task, headers, sticky[:MAX_STICKY] if sticky else None)
        resolved[task.model] = await client.resolve(task.model, selection, withdrawn=withdrawn)
    return resolved[task.model]


def sticky_in(body: Mapping[str, Any]) -> str | None:
    """The key of a request's body: what names its user, or its conversation."""
    return next((value for name in STICKY if isinstance(value := body.get(name), str) and value), None)


def moved(connection: HTTPConnection, model: str, resolved: ResolvedModel) -> None:
    """A request's tasks of a model go to another version than it had resolved: routing has changed meanwhile."""
    _resolved(connection)[model] = resolved


def settle(connection: HTTPConnection, model: str) -> None:
    """The first of a request's tasks was admitted: the others go to its version, whatever a routing says by then."""
    resolved = _resolved(connection)
    if model in resolved:
        selection = Selection(version=resolved[model].card["version"])
        resolved[model] = replace(resolved[model], selection=selection, drawn="")


def _resolved(connection: HTTPConnection) -> dict[str, ResolvedModel]:
    resolved: dict[str, ResolvedModel] = connection.scope["state"].setdefault("models", {})
    return resolved


def begin_trace(headers: Headers, tracer: Tracer | None) -> RequestSpan | None:
    """Begin a request with these headers. More than one `traceparent` counts as none. Returns the request's own span,
    which is its tasks' parent; None if traces are turned off."""
    values = headers.getlist("traceparent")
    fields = trace_fields(values[0]) if len(values) == 1 else {}
    if tracer is None:
        _trace.set(fields)
        return None
    span = RequestSpan(tracer, TraceParent.parse(fields.get("traceparent")))
    # What nobody records keeps its caller's own, if there is one.
    _trace.set({"traceparent": span.context.header()} if span.context.sampled or not fields else fields)
    return span


def current_trace() -> Mapping[str, str]:
    """Returns the fields of the current request's trace, for tasks that are made later."""
    return _trace.get()


def log_subject(request_id: str) -> dict[str, str]:
    """The `extra` of a log line about the current request (`producers.connection.logs`)."""
    return subject(trace_id=trace_id(current_trace().get("traceparent")), request_id=request_id)


class TracedClient(AsyncClient):
    """The gateway's client. Its tasks belong to the trace of the request that makes them."""

    async def admit(
        self,
        task: Task,
        task_id: str | None = None,
        more: Mapping[str, str | int] = TASK,
        charge: Charge | None = None,
        room: Room | None = None,
        resolved: ResolvedModel | None = None,
        moved: Callable[[ResolvedModel], None] | None = None,
    ) -> AsyncHandle:
        return await super().admit(task, task_id, {**more, **current_trace()}, charge, room, resolved, moved)
