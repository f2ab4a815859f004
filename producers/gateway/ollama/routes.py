"""`/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`: requests of Ollama's API that become tasks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from producers.contract.chat import read_string
from producers.contract.task import Task
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import PARAMETER, SUBMITS_TASKS, tenant_of
from producers.gateway.http.request_body import INLINE, checked, documented, read_object
from producers.gateway.http.request_state import work_of
from producers.gateway.http.sse import Direct
from producers.gateway.ollama.answer import CHAT, GENERATE, Form, Lines, LineStream, WholeObject, loaded
from producers.gateway.ollama.models import MODEL, card_of, errors, named
from producers.gateway.ollama.request import EFFORTS, OPTIONS, check_model, read_chat, read_generate, warn_of_unknown
from producers.gateway.openai.answer import respond
from producers.gateway.openai.chat import ChatRequest, choices_of, prepare
from producers.gateway.openai.complete import whole_answer
from producers.gateway.openai.parameters import SERVICE_TIERS
from producers.gateway.openai.pooling import EMBEDDINGS, ENDPOINTS, Endpoint, PooledRows, decimal, pooled
from producers.gateway.openai.tools import TOOL_PARAMETERS

router = APIRouter(prefix="/api", tags=["ollama"])

_BOOLEAN: Final = {"type": "boolean"}
_TEXT: Final = {"type": "string"}
#: The JSON schemas of what both bodies have.
_BOTH: Final[dict[str, Any]] = {
    "model": MODEL,
    "stream": {"type": "boolean", "description": "lines of JSON as they come; unset: true"},
    "format": {"anyOf": [{"enum": ["", "json"]}, {"type": "object", "description": "a JSON schema"}]},
    "options": {"type": "object", "properties": {name: {} for name in OPTIONS}},
    "think": {"anyOf": [_BOOLEAN, {"enum": list(EFFORTS)}]},
    "keep_alive": {"description": "taken, and not used"},
    "truncate": {"type": "boolean", "description": "cut a prompt that is too long at its beginning"},
    "logprobs": _BOOLEAN,
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "service_tier": {"enum": list(SERVICE_TIERS)},
}
_MESSAGE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        **dict.fromkeys(("role", "content", "thinking", "tool_name", "tool_call_id"), _TEXT),
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
}
_CHAT: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "properties": {
        **_BOTH,
        "messages": {"type": "array", "items": _MESSAGE},
        "tools": TOOL_PARAMETERS["tools"],
    },
}
_GENERATE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "properties": {**_BOTH, "prompt": _TEXT, "system": _TEXT, "raw": _BOOLEAN},
}
_INPUT: Final = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_EMBED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": MODEL,
        "input": _INPUT,
        "truncate": {"type": "boolean", "description": "cut texts that are too long; unset: true"},
        "dimensions": {"type": "integer", "minimum": 0},
        "service_tier": _BOTH["service_tier"],
    },
}
_OLDER_EMBED: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": MODEL, "prompt": _TEXT},
}
_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "application/x-ndjson": {}}},
    **errors(404, 409, 413, 415, 422, 429, 504),
}


def _openapi(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": [PARAMETER, idempotency.PARAMETER], **documented(schema)}


#: Reads a body, of the model's name, the tenant, and the list that gets what is not followed.
Read = Callable[[Mapping[str, Any], str, str | None, list[str]], ChatRequest]


#: Values of a prompt that is none.
NOTHING: Final[tuple[Any, ...]] = (None, "", [])


async def _look(request: Request, gateway: Gateway, model: str) -> None:
    """Look whether a model is there, for a body without a prompt. A large one counts in a minute's requests: it makes
    no task that would. Raises as `card_of`."""
    await card_of(request, gateway, model)
    work = work_of(request)
    if work.size is not None and work.size > INLINE:
        await gateway.accounts.charge_refused(request, work)


async def _answer(request: Request, prompt: str, read: Read, form: Form) -> Response:
    """Answer a body whose field `prompt` is what the model goes on with. Raises Problem, InvalidTask and UnknownModel,
    in the caller's names."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    body, tenant = await read_object(request, gateway.settings.max_body), tenant_of(request)
    said = check_model(body, "model")
    if body.get(prompt) in NOTHING:
        await _look(request, gateway, said)
        unload = body.get("keep_alive") in (0, "0", "0s")
        return Response(loaded(said, form, "unload" if unload else "load"), media_type="application/json")
    model = await named(request, gateway, said)
    warnings = work_of(request).warnings

    def parsed() -> tuple[ChatRequest, Task]:
        chat = read(body, model, tenant, warnings)
        return chat, chat.text_request.task([0], logprobs=chat.logprobs)

    chat, task = await checked(request, parsed)
    prepared = await prepare(request, gateway, chat, task)
    foreground = prepared.foreground

    async def answer() -> Response:
        handle = gateway.client.get(foreground.ids[0])
        if chat.text_request.stream:
            lines = Lines(prepared, form, said)
            direct = Direct(lines.tokens)
            return LineStream(lines.lines(foreground, handle, direct), foreground, gateway, direct)
        (choice,) = choices_of(1, prepared.scorer, prepared.syntax, foreground.ids[0])
        whole = WholeObject(choice, form, said, handle)
        return await whole_answer(request, gateway, foreground, whole, foreground.shortened)

    return await respond(prepared.chat.text_request, foreground, answer)


@router.post("/chat", dependencies=SUBMITS_TASKS, response_model=None, responses=_ANSWER, openapi_extra=_openapi(_CHAT))
async def create_chat(request: Request) -> Response:
    """Ollama's chat; docs/use/ollama.md says which fields are taken."""
    return await _answer(request, "messages", read_chat, CHAT)


@router.post(
    "/generate", dependencies=SUBMITS_TASKS, response_model=None, responses=_ANSWER, openapi_extra=_openapi(_GENERATE)
)
async def generate(request: Request) -> Response:
    """Ollama's answer to one prompt; docs/use/ollama.md says which fields are taken."""
    return await _answer(request, "prompt", read_generate, GENERATE)


def _entries(fields: Mapping[str, Any], rows: PooledRows, first: int) -> list[str]:
    return [decimal(row) for row in rows.vectors()]  # type: ignore[arg-type]  # a bad text fails the task


def _embedded(model: str, began: int, fields: Mapping[str, Any], rows: PooledRows) -> bytes:
    vectors = ", ".join(_entries(fields, rows, 0))
    took = {"total_duration": time.perf_counter_ns() - began, "load_duration": 0, "prompt_eval_count": rows.tokens}
    return f'{{"model": {json.dumps(model)}, "embeddings": [{vectors}], {json.dumps(took)[1:]}'.encode()


def _one_embedded(fields: Mapping[str, Any], rows: PooledRows) -> bytes:
    return f'{{"embedding": {_entries(fields, rows, 0)[0]}}}'.encode()


#: Fields of bodies with texts to embed that are taken, but the model and the texts.
OF_VECTORS: Final = ("truncate", "dimensions", "service_tier", "user")


async def _vectors(request: Request, texts: str, endpoint: Callable[[str], Endpoint], nothing: str) -> Response:
    """Answer a body whose field `texts` has them. `endpoint`: of the model's name. `nothing`: the member that is empty
    in an answer to no text."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    body = await read_object(request, gateway.settings.max_body)
    said = check_model(body, "model")
    if body.get(texts) in NOTHING:
        await _look(request, gateway, said)
        return JSONResponse({"model": said, nothing: []})
    known = ("model", texts, *OF_VECTORS, "keep_alive", "options")
    warn_of_unknown((name for name, value in body.items() if value is not None), known, work_of(request).warnings)
    taken = {name: body[name] for name in OF_VECTORS if body.get(name)}
    if body.get("truncate") is False:
        taken["truncate"] = False
    taken |= {"model": await named(request, gateway, said), texts: body[texts]}
    chosen = endpoint(said)
    return await pooled(request, gateway, chosen, await checked(request, lambda: chosen.fields(taken)))


@router.post(
    "/embed", dependencies=SUBMITS_TASKS, response_model=None, responses=_ANSWER, openapi_extra=_openapi(_EMBED)
)
async def embed(request: Request) -> Response:
    """Ollama's embeddings: a vector for each text."""
    began = time.perf_counter_ns()

    def endpoint(model: str) -> Endpoint:
        answer = partial(_embedded, model, began)
        usual = ENDPOINTS[EMBEDDINGS]
        return replace(usual, answer=answer, entries=_entries, cuts=True, listed="embeddings")

    return await _vectors(request, "input", endpoint, "embeddings")


@router.post(
    "/embeddings",
    dependencies=SUBMITS_TASKS,
    response_model=None,
    responses=_ANSWER,
    openapi_extra=_openapi(_OLDER_EMBED),
)
async def older_embed(request: Request) -> Response:
    """Ollama's older endpoint for one vector."""
    usual = ENDPOINTS[EMBEDDINGS]
    properties = {**usual.schema["properties"], "prompt": _TEXT}
    one = replace(
        usual,
        schema={**usual.schema, "required": ["model", "prompt"], "properties": properties},
        texts={"input": "prompt"},
        checks={**usual.checks, "prompt": read_string},
        answer=_one_embedded,
        entries=None,
        cuts=True,
    )
    return await _vectors(request, "prompt", lambda _: one, "embedding")
