"""`POST /v1/messages`, `POST /v1/messages/count_tokens`, and the list of models as Anthropic's clients take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from producers.contract.task import Task
from producers.errors import shown
from producers.gateway.admission.limits import check_may_use_model
from producers.gateway.anthropic.answer import EventWriter, MessageStream, OutputReader, WholeMessage, opened
from producers.gateway.anthropic.request import openapi, read_message, stops_of
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import SUBMITS, SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import MESSAGES, REQUEST_ID, invalid_value
from producers.gateway.http.request_body import INLINE, SETTINGS, checked, query_parameters, read_object
from producers.gateway.http.request_state import resolve, work_of
from producers.gateway.http.sse import Direct
from producers.gateway.openai.answer import respond
from producers.gateway.openai.chat import ChatRequest, prepare
from producers.gateway.openai.complete import whole_answer
from producers.gateway.openai.parameters import check_chats
from producers.gateway.openai.reasoning import reasoning_of
from producers.gateway.openai.tools import variables_of
from producers.gateway.tasks.views import ModelView

router = APIRouter(prefix=MESSAGES, tags=["anthropic"])
#: Models in one page, unless asked for otherwise, and the most.
PAGE, MAX_PAGE = 20, 1000


class ErrorDetails(BaseModel):
    error_code: str
    param: str | None


class AnthropicErrorBody(BaseModel):
    type: str
    message: str
    details: ErrorDetails


class AnthropicErrorView(BaseModel):
    """The form of every error for Anthropic's clients."""

    type: Literal["error"]
    error: AnthropicErrorBody
    request_id: str


class Counted(BaseModel):
    input_tokens: int


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's responses for errors with these statuses, and those that any request may get."""
    return {status: {"model": AnthropicErrorView} for status in (400, 401, 403, 408, *statuses, 500, 503)}


@router.post(
    "",
    dependencies=SUBMITS_TASKS,
    response_class=JSONResponse,
    response_model=None,
    responses={
        200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}},
        **_errors(404, 409, 413, 415, 422, 429, 504),
    },
    openapi_extra=openapi("max_tokens"),
)
async def create(request: Request) -> Response:
    """Anthropic's Messages; docs/use/anthropic.md says which parameters are taken."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    body, tenant = await read_object(request, gateway.settings.max_body), tenant_of(request)

    def read() -> tuple[ChatRequest, Task]:
        parsed = read_message(body, tenant)
        return parsed, parsed.text_request.task([0])

    ready = await prepare(request, gateway, *await checked(request, read))
    foreground, text_request = ready.foreground, ready.chat.text_request

    async def answer() -> Response:
        reader = OutputReader(ready, stops_of(ready.chat))
        if text_request.stream:
            writer = EventWriter(ready, reader)
            request_id = request.scope["state"][REQUEST_ID]
            return MessageStream(writer, foreground, gateway, Direct(writer.tokens), request_id)
        return await whole_answer(request, gateway, foreground, WholeMessage(reader, ready.task.tier), opened(ready))

    return await respond(text_request, foreground, answer)


@router.post(
    "/count_tokens",
    dependencies=SUBMITS,
    response_model=Counted,
    responses=_errors(404, 413, 415, 429),
    openapi_extra=openapi(),
)
async def count_tokens(request: Request) -> Counted:
    """Count the input tokens of a message that would be asked for with this body; max_tokens may be missing. A body of
    more than 64 KiB counts in a minute's requests."""
    gateway = gateway_of(request)
    body, tenant = await read_object(request, min(gateway.settings.max_body, SETTINGS)), tenant_of(request)

    def read() -> tuple[ChatRequest, Task]:
        parsed = read_message(body, tenant, counting=True)
        return parsed, parsed.text_request.task([0])

    work, accounts = work_of(request), gateway.accounts
    counts = work.size is not None and work.size > INLINE
    if counts and accounts.spent:
        await accounts.check_spent(request, tenant)
    chat, task = await checked(request, read)
    check_may_use_model(principal_of(request), task.model)
    card = (await resolve(request, gateway.client, task)).card
    with chat.text_request.naming():
        check_chats(card)
        reasoning = await reasoning_of(
            gateway.templates, gateway.prompts, card, chat.reasoning, work, chat.variables, begun=chat.begun
        )
        template = {} if reasoning is None else dict(reasoning.variables)
        template |= {**chat.template, **await variables_of(gateway, card, chat.tools)}
        text = await gateway.templates.render(card, chat.messages, work, **template)
        tokens = await gateway.prompts.encode(card, text, work, special=False)
    if counts:
        await accounts.charge_refused(request, work)
    return Counted(input_tokens=len(tokens))


def model_of(view: ModelView) -> dict[str, Any]:
    """A model as Anthropic's clients take it."""
    return {
        "type": "model",
        "id": view.id,
        "display_name": view.id,
        "created_at": datetime.fromtimestamp(view.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": view.context_length,
        "max_tokens": view.context_length,
    }


def model_page(request: Request, views: Sequence[ModelView]) -> JSONResponse:
    """The page of models that a query asks for: `limit`, `after_id` or `before_id`. Raises Problem."""
    query = query_parameters(request, ("limit", "after_id", "before_id", "beta"))
    data = [model_of(view) for view in views]
    limit, first = _limit(query), 0
    if "after_id" in query and "before_id" in query:
        raise invalid_value("before_id", "after_id and before_id are both given; give one of them")
    if "after_id" in query:
        first = _place(data, query, "after_id") + 1
    if "before_id" in query:
        last = _place(data, query, "before_id")
        page, more = data[max(0, last - limit) : last], last > limit
    else:
        page, more = data[first : first + limit], len(data) > first + limit
    ids = [model["id"] for model in page] or [None]
    return JSONResponse({"data": page, "has_more": more, "first_id": ids[0], "last_id": ids[-1]})


def _limit(query: Mapping[str, str]) -> int:
    text = query.get("limit", str(PAGE))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= MAX_PAGE):
        raise invalid_value("limit", f"limit is {shown(text)}; limit must be an integer from 1 to {MAX_PAGE}")
    return int(text)


def _place(data: Sequence[Mapping[str, Any]], query: Mapping[str, str], name: str) -> int:
    place = next((at for at, model in enumerate(data) if model["id"] == query[name]), None)
    if place is None:
        raise invalid_value(name, f"{name} is {shown(query[name])}; {name} must be the id of a model in this list")
    return place
