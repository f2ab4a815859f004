"""The routes of `/v1/tasks`: submit, get, stream, cancel."""

from __future__ import annotations

import re
import time
from typing import Final

from fastapi import APIRouter, Request, Response

from producers.client.reader import MAX_POSITION
from producers.contract.events import Event
from producers.contract.task import Task
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.body import read_task
from producers.gateway.http.errors import Problem
from producers.gateway.http.sse import EVENT, EventStream
from producers.gateway.tasks import outcome
from producers.gateway.tasks.cancelling import cancelled
from producers.gateway.tasks.submit import encoded, submitted
from producers.gateway.tasks.views import Cancelled, TaskView, errors

router = APIRouter(prefix="/v1/tasks", tags=["tasks"])

_POSITION: Final = {"type": "integer", "minimum": 0, "maximum": MAX_POSITION}


@router.post(
    "",
    status_code=202,
    response_model=TaskView,
    response_model_exclude_unset=True,
    responses=errors(404, 413, 415, 422, 429),
    openapi_extra={
        "parameters": [idempotency.PARAMETER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": Task.model_json_schema()}}},
    },
)
async def submit(request: Request, response: Response) -> TaskView:
    """Submit a task. It is durable once this answers."""
    gateway = gateway_of(request)
    task = await read_task(request, gateway.settings.max_body)
    request.state.tier = task.tier
    task = await encoded(gateway, task)
    task_id, original = await submitted(request, gateway, task)
    response.headers["location"] = f"/v1/tasks/{task_id}"
    if original is not None:
        response.headers.update(idempotency.REPLAYED)
        return TaskView.of(original)
    return TaskView(
        id=task_id,
        object="task",
        status="queued",
        model=task.model,
        tier=task.tier,
        n=task.n,
        # By this machine's clock: asking the store for its time could fail after the task is queued.
        created_at=round(time.time(), 3),
        metadata=task.metadata,
    )


@router.get("/{task_id}", response_model=TaskView, responses=errors(404))
async def look(request: Request, task_id: str) -> Response:
    """Get a task's state, and its outputs once it is final."""
    gateway = gateway_of(request)
    handle = gateway.client.get(task_id)
    record = await handle.status()
    if record.final:
        return await outcome.answer(gateway, handle, record)
    return Response(TaskView.of(record).model_dump_json(), media_type="application/json")


@router.get(
    "/{task_id}/events",
    status_code=200,
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: `prompt` for the prompt's log probabilities, where asked for; "
            "`token` for each token; then one `end`.",
            "content": {EventStream.media_type: {"schema": EVENT}},
        },
        204: {"description": "The stream ended before the position asked for: do not come back."},
        **errors(404),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "from",
                "in": "query",
                "description": "the first position to send; the header Last-Event-ID, one less, goes before it",
                "schema": _POSITION | {"default": 0},
            },
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "the last position that was read, as an EventSource says when it comes back",
                "schema": _POSITION,
            },
        ]
    },
)
async def follow(request: Request, task_id: str) -> Response:
    """Stream a task's events from any position on, until it ends."""
    gateway = gateway_of(request)
    start = _start(request)
    handle = gateway.client.get(task_id)
    record = await handle.status()
    batches = handle.batches(start)
    first: list[Event] = []
    if record.final:
        # An EventSource reconnects after each response until it gets 204.
        first = await anext(batches, [])
        if not first:
            return Response(status_code=204)
    settings = gateway.settings
    return EventStream(batches, gateway.streams, first=first, heartbeat=settings.heartbeat, stall=settings.stall)


@router.post("/{task_id}/cancel", response_model=Cancelled, responses=errors(404))
async def cancel(request: Request, task_id: str) -> Response:
    """Cancel a task, and answer with the task.

    An accepted task ends `cancelled`: at once if no worker runs it, else within a step. Repeating it changes nothing.
    """
    gateway = gateway_of(request)
    handle = gateway.client.get(task_id)
    accepted, record = await cancelled(handle)
    if record.final:
        return await outcome.answer(gateway, handle, record, accepted=accepted)
    said = Cancelled(accepted=accepted, **TaskView.of(record).model_dump())
    return Response(said.model_dump_json(), media_type="application/json")


def _start(request: Request) -> int:
    """The requested position. The header wins: a reconnecting browser repeats the URL and adds the header."""
    last = request.headers.get("last-event-id")
    if last:
        return _position(last, "Last-Event-ID") + 1
    asked = request.query_params.get("from")
    return 0 if asked is None else _position(asked, "from")


def _position(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > MAX_POSITION:
        raise Problem(
            400,
            f"{name} is {shown(text)}; it must be a position in the stream, from 0 up.",
            code="invalid_value",
            param=name,
        )
    return int(text)
