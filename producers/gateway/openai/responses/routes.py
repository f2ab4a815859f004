"""`/v1/responses`: creates, retrieves, cancels and deletes responses, and lists what went into them."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from producers.client.aio import AsyncHandle
from producers.contract.record import Record
from producers.errors import TaskNotFound, shown
from producers.gateway.context import gateway_of
from producers.gateway.http.caller import CANCELS, READS, SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request.body import read_object
from producers.gateway.openai.responses import conversation, query
from producers.gateway.openai.responses.answer import answer, scorer_of
from producers.gateway.openai.responses.making import make
from producers.gateway.openai.responses.request import PARAMETERS, read_response
from producers.gateway.openai.responses.story import Story
from producers.gateway.openai.responses.stream import ResponseStream
from producers.gateway.openai.responses.view import PREFIX, About, Output
from producers.gateway.tasks.own import cancelled
from producers.gateway.tasks.views import errors

router = APIRouter(prefix="/v1/responses", tags=["openai"])

#: A response's JSON schema, for OpenAPI.
RESPONSE: Final = {
    "type": "object",
    "required": ["id", "object", "created_at", "status", "model", "output", "usage", "error", "metadata"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "response"},
        "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]},
        "output": {"type": "array", "items": {"type": "object"}},
    },
}
_JSON: Final = {"application/json": {"schema": RESPONSE}}
_BOTH: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {**_JSON, "text/event-stream": {}}}}
_ONE: Final = {200: {"content": _JSON}, **errors(404)}


@router.post(
    "",
    dependencies=SUBMITS_TASKS,
    response_class=JSONResponse,
    response_model=None,
    responses={**_BOTH, **errors(404, 409, 413, 415, 422, 429, 504)},
    openapi_extra=PARAMETERS.openapi(),
)
async def create(request: Request) -> Response:
    """OpenAI's Responses; docs/responses.md says which parameters are taken."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    wanted = read_response(await read_object(request, gateway.settings.max_body), tenant_of(request))
    return await make(request, gateway, wanted)


@router.get(
    "/{response_id}",
    dependencies=[*READS, Depends(query.include)],
    response_class=JSONResponse,
    response_model=None,
    responses={**_BOTH, **errors(404)},
)
async def retrieve(request: Request, response_id: str, after: Annotated[int | None, Depends(query.after)]) -> Response:
    """Get a response; as a stream, all of its events, or those after one of them."""
    gateway = gateway_of(request)
    if after is not None:
        await gateway.streams.enter(request.scope, "events")
    handle, record, about = await _found(request, response_id)
    if after is None:
        return await answer(gateway, handle, record, about)
    scorer = await scorer_of(gateway, record)
    return ResponseStream(Story(about, Output(scorer), after), handle, gateway)


@router.post(
    "/{response_id}/cancel", dependencies=CANCELS, response_class=JSONResponse, response_model=None, responses=_ONE
)
async def cancel(request: Request, response_id: str) -> Response:
    """Cancel a response, and answer with it. One that has ended stays as it is."""
    gateway = gateway_of(request)
    handle, _, about = await _found(request, response_id)
    _, record = await cancelled(handle)
    if record.final and not principal_of(request).may("read"):
        return JSONResponse(about.ended(record) | {"output": []})
    return await answer(gateway, handle, record, about)


@router.delete(
    "/{response_id}",
    dependencies=CANCELS,
    response_class=JSONResponse,
    response_model=None,
    responses={**_ONE, 200: {}},
)
async def delete(request: Request, response_id: str) -> Response:
    """Delete a response and all that is stored of it; one that has not ended is cancelled."""
    handle, _, _ = await _found(request, response_id)
    with suppress(TaskNotFound):  # another request deletes it at the same time
        await handle.delete()
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/{response_id}/input_items",
    dependencies=[*READS, Depends(query.include)],
    response_class=JSONResponse,
    response_model=None,
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}, **errors(404)},
)
async def input_items(
    request: Request,
    response_id: str,
    order: Annotated[Literal["asc", "desc"], Query(description="the last first, unless told otherwise")] = "desc",
    after: Annotated[str | None, Query(description="an item's id: the page begins behind it")] = None,
    limit: Annotated[int, Query(ge=1, le=query.MAX_PAGE, description="most items")] = query.PAGE,
) -> Response:
    """The items that a response was made from: those of the responses before it, and its own."""
    _, _, about = await _found(request, response_id)
    return JSONResponse(query.page(about.items, order, after, limit))


async def _found(request: Request, response_id: str) -> tuple[AsyncHandle, Record, About]:
    """A stored response of the caller. Raises Problem, redis.exceptions.RedisError or OSError."""
    found = await conversation.find(request, response_id)
    if found is None:
        raise Problem(
            404,
            f"There is no response {shown(response_id)} of yours: never made, not stored, deleted, or past its time to "
            f"live. The id of a response begins with {PREFIX}",
            code="response_not_found",
        )
    return found
