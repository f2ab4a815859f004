"""The routes of `/v1/tasks`: submit, list, get, stream, cancel, retry, delete."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from producers.client.listing import list_tasks
from producers.client.operations import repeated
from producers.client.steps import FAILURES
from producers.client.submission import TASK
from producers.contract.task import Task
from producers.errors import PenstockError
from producers.gateway.context import gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import CANCELS, READS, SUBMITS_TASKS, principal_of
from producers.gateway.http.authorization import PARAMETER as TENANT_PARAMETER
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import read_task
from producers.gateway.tasks import listing, outcome, wait
from producers.gateway.tasks.ownership import cancelled, owned, task_of
from producers.gateway.tasks.submit import encoded, made, submitted
from producers.gateway.tasks.views import Cancelled, Deleted, TaskList, TaskView, errors

router = APIRouter(prefix="/v1/tasks", tags=["tasks"])

#: The answer to a submit that waited for the task's end (`Prefer: wait`), for OpenAPI.
ENDED: Final[dict[str, Any]] = {"model": TaskView, "description": "The task ended while its caller waited."}


@router.post(
    "",
    dependencies=SUBMITS_TASKS,
    status_code=202,
    response_model=TaskView,
    responses={200: ENDED, **errors(404, 413, 415, 422, 429)},
    openapi_extra={
        "parameters": [idempotency.PARAMETER, wait.PARAMETER, TENANT_PARAMETER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": Task.model_json_schema()}}},
    },
)
async def submit(request: Request) -> Response:
    """Submit a task. It is durable once this answers."""
    gateway = gateway_of(request)
    seconds = await wait.entered(request, gateway)
    task = owned(request, await read_task(request, gateway.settings.max_body))
    request.state.tier = task.tier
    return await _accepted(request, await encoded(request, gateway, task), TASK, seconds)


@router.get(
    "",
    dependencies=READS,
    response_model=TaskList,
    responses=errors(404),
    openapi_extra={"parameters": listing.PARAMETERS},
)
async def list_all(request: Request) -> Response:
    """List tasks that were submitted here or by the Python client, without their outputs; the latest first."""
    gateway = gateway_of(request)
    page = await gateway.client.run(
        list_tasks(listing.read_query(request, principal_of(request)), gateway.settings.patience)
    )
    return _json(listing.view(page))


@router.get(
    "/{task_id}",
    dependencies=READS,
    response_model=TaskView,
    responses=errors(404),
    openapi_extra={"parameters": [wait.PARAMETER]},
)
async def look(request: Request, task_id: str) -> Response:
    """Get a task's state, and its outputs once it is final."""
    gateway = gateway_of(request)
    seconds = await wait.entered(request, gateway)
    handle = await task_of(request, task_id)
    record = await handle.status()
    if seconds is not None and not record.final:
        await wait.wait(request, gateway, handle, seconds)
        record = await handle.status()
    answer = await outcome.answer(gateway, handle, record) if record.final else _json(TaskView.of(record))
    answer.headers.update(wait.applied(seconds))
    return answer


@router.post(
    "/{task_id}/retry",
    dependencies=SUBMITS_TASKS,
    status_code=202,
    response_model=TaskView,
    responses={200: ENDED, **errors(404, 409, 422, 429)},
    openapi_extra={"parameters": [idempotency.PARAMETER, wait.PARAMETER]},
)
async def retry(request: Request, task_id: str) -> Response:
    """Submit a task that has ended once more, as a new task with the same fields, seed and webhook."""
    seconds = await wait.entered(request, gateway_of(request))
    task, more = repeated(await (await task_of(request, task_id)).status())
    request.state.tier = task.tier
    idempotency.note_body(request, b"")
    # A text's tokens are not counted where no gateway submitted it.
    if await gateway_of(request).accounts.limited(request, task.tenant):
        task = await encoded(request, gateway_of(request), task)
    return await _accepted(request, task, more, seconds)


@router.post("/{task_id}/cancel", dependencies=CANCELS, response_model=Cancelled, responses=errors(404))
async def cancel(request: Request, task_id: str) -> Response:
    """Cancel a task, and answer with the task.

    An accepted task ends `cancelled`: at once if no worker runs it, else within a step. Repeating it changes nothing.
    """
    gateway = gateway_of(request)
    handle = await task_of(request, task_id)
    accepted, record = await cancelled(handle)
    if record.final and principal_of(request).may("read"):
        return await outcome.answer(gateway, handle, record, accepted=accepted)
    view = Cancelled(accepted=accepted, **TaskView.of(record).model_dump())
    return Response(view.model_dump_json(), media_type="application/json")


@router.delete("/{task_id}", dependencies=CANCELS, response_model=Deleted, responses=errors(404, 409))
async def delete(request: Request, task_id: str) -> Response:
    """Delete a task and all that is stored of it; one that has not ended is cancelled first.

    Afterwards its id is unknown, and webhooks that were not sent yet are not sent any more.
    """
    await (await task_of(request, task_id)).delete()
    return _json(Deleted(id=task_id))


async def _accepted(request: Request, task: Task, more: Mapping[str, str | int], seconds: int | None) -> Response:
    """Submit an encoded task and answer with it: 202, or 200 if it ended while the caller waited, if so long."""
    gateway = gateway_of(request)
    task_id, record = await submitted(request, gateway, task, more)
    headers = {"location": f"/v1/tasks/{task_id}"} | (idempotency.REPLAYED if record is not None else {})
    if seconds is not None:
        handle = gateway.client.get(task_id)
        await wait.wait(request, gateway, handle, seconds)
        headers |= wait.applied(seconds)
        with suppress(Problem, PenstockError, *FAILURES):  # it is submitted, whatever the store answers now
            record = await handle.status()
            if record.final:
                answer = await outcome.answer(gateway, handle, record)
                answer.headers.update(headers)
                return answer
    view = (
        made(task_id, task, more, getattr(request.state, "shortened_to", None))
        if record is None
        else TaskView.of(record)
    )
    return Response(view.model_dump_json(exclude_unset=record is None), 202, headers, "application/json")


def _json(view: BaseModel) -> Response:
    return Response(view.model_dump_json(), media_type="application/json")
