"""`/v1/responses`: creates, retrieves, cancels and deletes responses, and lists what went into them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse
from pydantic import WithJsonSchema
from starlette.responses import Response

from producers.client.aio import AsyncHandle
from producers.client.directory import encoding_of
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import TaskNotFound, UnknownModel, shown
from producers.gateway.admission.limits import check_may_use, check_may_use_model
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import CANCELS, READS, SUBMITS, SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import Problem, invalid_value
from producers.gateway.http.request_body import INLINE, SETTINGS, checked, read_object
from producers.gateway.http.request_state import Work, resolve, work_of
from producers.gateway.openai.answer import respond
from producers.gateway.openai.logprobs import ChatLogprobs
from producers.gateway.openai.output_parser import OutputSyntax
from producers.gateway.openai.parameters import refusal, refused
from producers.gateway.openai.reasoning import Reasoning, reasoning_of
from producers.gateway.openai.responses import conversation
from producers.gateway.openai.responses.request import (
    INCLUDABLE,
    PARAMETERS,
    Item,
    ResponseRequest,
    bounded,
    included,
    read_response,
)
from producers.gateway.openai.responses.view import (
    PREFIX,
    EventWriter,
    Output,
    ResponseMetadata,
    ResponseStream,
    by_size,
)
from producers.gateway.openai.tools import calling_of, variables_of
from producers.gateway.tasks import outcome
from producers.gateway.tasks.foreground import Foreground, answered
from producers.gateway.tasks.ownership import audit_operator, cancelled, foreign_tenant
from producers.gateway.tasks.submit import original, submitted
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
#: A count's JSON schema, for OpenAPI.
COUNT: Final = {
    "type": "object",
    "required": ["object", "input_tokens"],
    "properties": {"object": {"const": "response.input_tokens"}, "input_tokens": {"type": "integer"}},
}
_JSON: Final = {"application/json": {"schema": RESPONSE}}
_BOTH: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {**_JSON, "text/event-stream": {}}}}
_ANSWERS: Final = {200: {"content": _JSON}, **errors(404)}
#: Most items in one page, and how many unless asked.
MAX_PAGE, PAGE = 100, 20
#: Largest sequence number that is taken.
MAX_NUMBER: Final = 999_999_999
Stream = Annotated[Literal["true", "false"] | None, WithJsonSchema({"type": "boolean"})]
#: `true` is refused with words of its own.
Obfuscation = Annotated[Literal["true", "false"], WithJsonSchema({"enum": ["false"]})]
_INCLUDE: Final = Query(
    alias="include[]",
    description="log probabilities are there if they were made; of the others there is nothing here",
    json_schema_extra={"items": {"enum": list(INCLUDABLE)}},
    default_factory=list,
)


def check_include(
    several: Annotated[list[str], _INCLUDE],
    single: Annotated[list[str], Query(alias="include", include_in_schema=False, default_factory=list)],
) -> None:
    """Checks what is to be included. OpenAI's clients write `include[]=a&include[]=b`, others `include=a`."""
    included([*several, *single])


def read_start(
    stream: Annotated[Stream, Query(description="whether to send events, from the beginning")] = None,
    starting_after: Annotated[
        int,
        Query(ge=-1, le=MAX_NUMBER, description="of a stream: the last `sequence_number` that was read; -1: none"),
    ] = -1,
    include_obfuscation: Annotated[Obfuscation, Query(description="not offered")] = "false",
) -> int | None:
    """The sequence number after which the stream begins, -1 for all of it; None if no stream is asked for."""
    if include_obfuscation == "true":
        raise refused("include_obfuscation", True, (False,))
    if stream == "true":
        return starting_after
    if starting_after != -1:
        raise invalid_value("starting_after", "starting_after is for streams; leave it out, or ask for stream=true")
    return None


def item_page(items: list[Item], order: str, after: str | None, limit: int) -> dict[str, Any]:
    """The list of items that a query asks for. Raises Problem."""
    remaining = items if order == "asc" else items[::-1]
    if after is not None:
        index = next((index for index, item in enumerate(remaining) if item.id == after), None)
        if index is None:
            raise refusal("after", after, "the id of one of this response's input items")
        remaining = remaining[index + 1 :]
    data = [item.view for item in remaining[:limit]]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(remaining) > limit}


@router.post(
    "",
    dependencies=SUBMITS_TASKS,
    response_class=JSONResponse,
    response_model=None,
    responses={**_BOTH, **errors(404, 409, 413, 415, 422, 429, 504)},
    openapi_extra=PARAMETERS.openapi(),
)
async def create(request: Request) -> Response:
    """OpenAI's Responses; docs/use/responses.md says which parameters are taken."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    body, tenant = await read_object(request, gateway.settings.max_body), tenant_of(request)

    def read() -> tuple[ResponseRequest, Task]:
        parsed = read_response(body, tenant)
        return parsed, parsed.task()

    return await make(request, gateway, *await checked(request, read))


@router.post(
    "/input_tokens",
    dependencies=SUBMITS,
    response_class=JSONResponse,
    response_model=None,
    responses={200: {"content": {"application/json": {"schema": COUNT}}}, **errors(404, 413, 415, 429)},
    openapi_extra=PARAMETERS.openapi(),
)
async def input_tokens(request: Request) -> Response:
    """Count the input tokens of a response that would be created with this body. Nothing is created. A body
    of more than 64 KiB counts in a minute's requests."""
    gateway = gateway_of(request)
    body, tenant = await read_object(request, min(gateway.settings.max_body, SETTINGS)), tenant_of(request)

    def read() -> tuple[ResponseRequest, Task]:
        parsed = read_response(body, tenant)
        return parsed, parsed.task()

    work, accounts = work_of(request), gateway.accounts
    counts = work.size is not None and work.size > INLINE
    if counts and accounts.spent:
        await accounts.check_spent(request, tenant)
    response_request, task = await checked(request, read)
    check_may_use_model(principal_of(request), task.model)
    resolved = await resolve(request, gateway.client, task)
    items = await _conversation(request, response_request)
    reasoning = await _reasoning(gateway, resolved.card, response_request, work)
    variables = {} if reasoning is None else dict(reasoning.variables)
    variables |= await variables_of(gateway, resolved.card, response_request.tools)
    task, _ = await conversation.fitted(gateway, resolved.card, response_request, task, items, work, variables)
    if counts:
        await accounts.charge_refused(request, work)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(task.prompt or ())})


@router.get(
    "/{response_id}",
    dependencies=[*READS, Depends(check_include)],
    response_class=JSONResponse,
    response_model=None,
    responses={**_BOTH, **errors(404)},
)
async def retrieve(request: Request, response_id: str, after: Annotated[int | None, Depends(read_start)]) -> Response:
    """Get a response; as a stream, all of its events, or those after one of them."""
    gateway = gateway_of(request)
    if after is not None:
        await gateway.streams.enter(request.scope, "events")
    handle, record, metadata = await _stored_response(request, response_id)
    if after is None:
        return await answer(gateway, handle, record, metadata)
    scorer = await scorer_of(gateway, record)
    return ResponseStream(
        EventWriter(metadata, scorer, after), handle, gateway, whole=principal_of(request).may("read")
    )


@router.post(
    "/{response_id}/cancel", dependencies=CANCELS, response_class=JSONResponse, response_model=None, responses=_ANSWERS
)
async def cancel(request: Request, response_id: str) -> Response:
    """Cancel a response, and answer with it. One that has ended stays as it is."""
    gateway = gateway_of(request)
    handle, _, metadata = await _stored_response(request, response_id)
    other = await foreign_tenant(request, keys.task(handle.id))
    accepted, record = await cancelled(handle)
    await audit_operator(request, "task.cancel", handle.id, other if accepted else None)
    if record.final and not principal_of(request).may("read"):
        return JSONResponse(metadata.ended(record) | {"output": []})
    return await answer(gateway, handle, record, metadata)


@router.delete(
    "/{response_id}",
    dependencies=CANCELS,
    response_class=JSONResponse,
    response_model=None,
    responses={**_ANSWERS, 200: {}},
)
async def delete(request: Request, response_id: str) -> Response:
    """Delete a response and all that is stored of it; one that has not ended is cancelled."""
    handle, _, _ = await _stored_response(request, response_id)
    other = await foreign_tenant(request, keys.task(handle.id))
    with suppress(TaskNotFound):  # another request deletes it at the same time
        await handle.delete()
        await audit_operator(request, "task.delete", handle.id, other)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get(
    "/{response_id}/input_items",
    dependencies=[*READS, Depends(check_include)],
    response_class=JSONResponse,
    response_model=None,
    responses={200: {"content": {"application/json": {"schema": {"type": "object"}}}}, **errors(404)},
)
async def input_items(
    request: Request,
    response_id: str,
    order: Annotated[Literal["asc", "desc"], Query(description="the last first, unless told otherwise")] = "desc",
    after: Annotated[str | None, Query(description="an item's id: the page begins behind it")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most items")] = PAGE,
) -> Response:
    """The items that a response was made from: those of the responses before it, and its own."""
    _, record, metadata = await _stored_response(request, response_id)
    return await by_size(record.fields, lambda: JSONResponse(item_page(metadata.items, order, after, limit)))


async def _stored_response(request: Request, response_id: str) -> tuple[AsyncHandle, Record, ResponseMetadata]:
    """A stored response of the caller. Raises Problem, redis.exceptions.RedisError or OSError."""
    stored = await conversation.find(request, response_id)
    if stored is None:
        raise Problem(
            404,
            f"There is no response {shown(response_id)} of yours: never made, not stored, deleted, or past its time to "
            f"live. The id of a response begins with {PREFIX}",
            code="response_not_found",
        )
    return stored


async def make(request: Request, gateway: Gateway, response_request: ResponseRequest, task: Task) -> Response:
    """Submit a response's task and answer, or answer with what an earlier request of this Idempotency-Key made.

    Raises InvalidTask, UnknownModel, SubmitFailed, Problem, redis.exceptions.RedisError or OSError.
    """
    request.state.tier = task.tier
    check_may_use(principal_of(request), task)
    if task.webhook is not None:
        await gateway.destinations.check(task.webhook.url, "webhook.url")
    resolved = await idempotency.resolve(request, gateway.client, task, 1, tenant=task.tenant)
    calling, work = None, work_of(request)
    reasoning = await _reasoning(gateway, resolved.card, response_request, work)
    if response_request.tools is not None:
        with response_request.text_request.naming():
            marks = () if reasoning is None else reasoning.marks
            calling = await calling_of(gateway, resolved.card, response_request.tools, work, marks)
    prompts = await idempotency.made_prompts(request, gateway.client, resolved, 1, tenant=task.tenant)
    if prompts is not None:  # its record has its conversation
        task = task.model_copy(update={"prompt": prompts[0]})
        items = await conversation.with_referenced(request, response_request.items)
    else:
        items = await _conversation(request, response_request)
        variables = {} if reasoning is None else dict(reasoning.variables)
        variables |= {} if calling is None else calling.variables
        task, items = await conversation.fitted(gateway, resolved.card, response_request, task, items, work, variables)
    with response_request.text_request.naming():
        (task,) = await gateway.accounts.sized(request, [task])
        task = bounded(task, resolved.card).resolved(resolved.card)
    if calling is not None:
        task = task.model_copy(update={"grammar": calling.grammar})
        work.warnings += calling.warnings
    reasoned = None
    if reasoning is not None:
        text_request = response_request.text_request
        with text_request.naming():
            reasoned = reasoning.applied(task, text_request.names, calling=calling is not None)
        task = reasoned.task
        response_request = replace(response_request, text_request=replace(text_request, names={**reasoned.names}))
    syntax = OutputSyntax.of(None if calling is None else calling.syntax, None if reasoned is None else reasoned.syntax)
    more = response_request.more(task, items, resolved.now_ms(), syntax)
    scorer = None if task.logprobs is None else ChatLogprobs(await gateway.prompts.tokenizer(resolved.card))
    kind = _background if response_request.background else _foreground
    return await kind(request, gateway, response_request, task, more, scorer)


async def _reasoning(
    gateway: Gateway, card: Mapping[str, Any], response_request: ResponseRequest, work: Work
) -> Reasoning | None:
    """The model's way to reason on a request. Raises as `reasoning_of`."""
    with response_request.text_request.naming():
        return await reasoning_of(gateway.templates, gateway.prompts, card, response_request.reasoning, work, {})


async def _conversation(request: Request, response_request: ResponseRequest) -> list[Item]:
    """The items of the responses before a request, and its own. Raises as `conversation.before` and
    `conversation.with_referenced`."""
    items = await conversation.with_referenced(request, response_request.items)
    if response_request.previous is None:
        return items
    return [*await conversation.before(request, response_request.previous), *items]


async def _background(
    request: Request,
    gateway: Gateway,
    response_request: ResponseRequest,
    task: Task,
    more: dict[str, Any],
    scorer: ChatLogprobs | None,
) -> Response:
    """Submit the task, which nobody's leaving cancels."""
    with response_request.text_request.naming():
        task_id, earlier = await submitted(request, gateway, task, more)
    if earlier is not None:
        return await _again(request, gateway, response_request, earlier)
    metadata = await ResponseMetadata.read(task_id, more)
    if response_request.text_request.stream:
        handle, whole = gateway.client.get(task_id), principal_of(request).may("read")
        return ResponseStream(EventWriter(metadata, scorer), handle, gateway, whole=whole)
    return opened(metadata, "queued")


async def _foreground(
    request: Request,
    gateway: Gateway,
    response_request: ResponseRequest,
    task: Task,
    more: dict[str, Any],
    scorer: ChatLogprobs | None,
) -> Response:
    """Submit the task, whose caller waits; with a key, the one of an earlier request, if there was one."""
    with response_request.text_request.naming():
        await gateway.forms.check(task, work_of(request))
    entry = await idempotency.first(request, gateway.client, str(uuid.uuid4()), tenant=task.tenant)
    if entry is not None:
        more["idempotency"] = entry.name
        if entry.state == "made":
            await original(gateway, entry.id)  # one that was deleted is not made again
    ids = None if entry is None else [entry.id]
    foreground = Foreground(request, gateway, [task], more, ids, entry)

    async def answer() -> Response:
        name = foreground.ids[0]
        earlier = await original(gateway, name) if foreground.replayed else None
        metadata = await ResponseMetadata.read(name, more if earlier is None else earlier.fields)
        if response_request.text_request.stream:
            writer = EventWriter(metadata, scorer if earlier is None else await scorer_of(gateway, earlier))
            return ResponseStream(writer, gateway.client.get(name), gateway, foreground)
        return await waited(request, gateway, metadata, foreground)

    return await respond(response_request.text_request, foreground, answer)


async def _again(request: Request, gateway: Gateway, response_request: ResponseRequest, record: Record) -> Response:
    """Answer with a background response that an earlier request of this key made."""
    handle, metadata = gateway.client.get(record.id), await ResponseMetadata.read(record.id, record.fields)
    response: Response
    if response_request.text_request.stream:
        writer, whole = EventWriter(metadata, await scorer_of(gateway, record)), principal_of(request).may("read")
        response = ResponseStream(writer, handle, gateway, whole=whole)
    else:
        response = await answer(gateway, handle, record, metadata)
    response.headers.update(idempotency.REPLAYED)
    return response


async def answer(gateway: Gateway, handle: AsyncHandle, record: Record, metadata: ResponseMetadata) -> Response:
    """The response as its record stands. Raises as `outcome.collected`."""
    if not record.final:
        return opened(metadata, record.status)
    output = Output(metadata, await scorer_of(gateway, record))
    return await outcome.collected(gateway, handle, output, partial(output.pieces, record))


def opened(metadata: ResponseMetadata, status: str) -> Response:
    """The response before its end."""
    return Response(json.dumps(metadata.open(status)), media_type="application/json")


async def waited(request: Request, gateway: Gateway, metadata: ResponseMetadata, foreground: Foreground) -> Response:
    """The response of a foreground task, once it has ended. Raises what `answered` and `outcome.collected` do, and
    Problem for one that failed."""

    async def ended() -> None:
        async with aclosing(foreground.events()) as batches:
            async for _ in batches:
                pass

    try:
        await answered(request, gateway, ended)
    finally:
        await foreground.close()
    handle = gateway.client.get(metadata.task_id)
    return await answer(gateway, handle, await handle.status(), metadata)


async def scorer_of(gateway: Gateway, record: Record) -> ChatLogprobs | None:
    """The speller of a response's log probabilities; None without any, or if the version that ran it is
    not known any more, and its model has another tokenizer.

    Raises as `Prompts.tokenizer`.
    """
    if record.task.get("logprobs") is None:
        return None
    try:
        resolved = await gateway.client.version_of(record)
    except UnknownModel:
        return None
    if not resolved.reads(encoding_of(record.fields)):
        return None
    return ChatLogprobs(await gateway.prompts.tokenizer(resolved.card))
