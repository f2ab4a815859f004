"""The trace that a request belongs to (`traceparent`), given on to every task that the request makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from starlette.datastructures import Headers

from producers.client.aio import AsyncClient, AsyncHandle
from producers.client.submission import TASK, ResolvedModel
from producers.contract.record import trace_fields, trace_suffix
from producers.contract.task import Task
from producers.store.usage.limits import Charge
from producers.store.waiting import Room

#: The record's fields for the current request's trace. Every request has a context of its own.
_fields: Final[ContextVar[Mapping[str, str]]] = ContextVar("traceparent", default={})  # noqa: B039 - never changed


def enter(headers: Headers) -> None:
    """Begin a request with these headers. More than one `traceparent` counts as none."""
    values = headers.getlist("traceparent")
    _fields.set(trace_fields(values[0]) if len(values) == 1 else {})


def fields() -> Mapping[str, str]:
    """The fields of the current request's trace, for what makes tasks later."""
    return _fields.get()


def suffix() -> str:
    """The end of a log line about the current request: ` trace=...`, or nothing."""
    return trace_suffix(fields())


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
    ) -> AsyncHandle:
        return await super().admit(task, task_id, {**more, **fields()}, charge, room, resolved)
