"""`/v1/embeddings`, `/v1/rerank`, `/v2/rerank`, `/v1/classify` and `/v1/score`: models that generate nothing.

body -> one task with all texts (a worker counts their tokens) -> its terminal entry, with a row for each text -> answer
"""

from __future__ import annotations

import base64
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.declared import MAX_INT32
from producers.client.submission import ResolvedModel
from producers.contract.stream import End, rows_of
from producers.contract.task import MAX_INPUTS, MAX_PROMPT_BYTES, Task
from producers.errors import InvalidTask, UnknownModel, shown
from producers.gateway.admission.limits import check_may_use
from producers.gateway.context import gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import PARAMETER, SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import documented, fields_of
from producers.gateway.openai.answer import run_by_weight
from producers.gateway.openai.parameters import KEPT_S, SERVICE_TIERS, in_callers_names
from producers.gateway.tasks import large
from producers.gateway.tasks.foreground import Foreground, answered, keyed
from producers.gateway.tasks.views import errors

router = APIRouter(tags=["openai"])

_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_BYTES}
_TEXTS: Final = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT}
_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32}}
_INPUT: Final = {
    "description": "a text, token ids, or a list of either",
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": {"anyOf": [_TEXT, _IDS]}},
    ],
}
#: What all of these endpoints take.
_EVERY: Final[dict[str, Any]] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 200},
    "service_tier": {"type": "string", "enum": list(SERVICE_TIERS)},
    "truncate": {"type": "boolean", "description": "cut texts that are too long"},
    "user": {"type": "string", "description": "taken, and not used"},
}


def _schema(required: Sequence[str], **own: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["model", *required],
        "properties": {**_EVERY, **own},
        "additionalProperties": False,
    }


EMBEDDINGS: Final = _schema(
    ["input"],
    input=_INPUT,
    encoding_format={"type": "string", "enum": ["float", "base64"]},
    dimensions={"type": "integer", "minimum": 1, "maximum": MAX_INT32},
    prompt_name={"type": "string", "minLength": 1, "maxLength": 200, "description": "one of the model's prompts"},
)
RERANK: Final = _schema(
    ["query", "documents"],
    query=_TEXT,
    documents={
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_INPUTS,
        "items": {
            "anyOf": [
                _TEXT,
                {"type": "object", "required": ["text"], "properties": {"text": _TEXT}, "additionalProperties": False},
            ]
        },
    },
    top_n={"type": "integer", "minimum": 1, "maximum": MAX_INT32},
    return_documents={"type": "boolean"},
)
CLASSIFY: Final = _schema(["input"], input=_INPUT)
SCORE: Final = _schema(["text_1", "text_2"], text_1=_TEXT, text_2={"anyOf": [_TEXT, _TEXTS]})
_ANSWER: Final = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}},
    **errors(404, 409, 413, 415, 422, 429, 504),
}


def _openapi(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": [PARAMETER, idempotency.PARAMETER], **documented(schema)}


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request whose task has ended."""

    resolved: ResolvedModel
    foreground: Foreground
    rows: list[array[float]]
    tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    @property
    def model(self) -> str:
        return str(self.resolved.card["name"])

    @property
    def numbers(self) -> int:
        return sum(map(len, self.rows))


async def _ended(request: Request, fields: Mapping[str, Any], names: Mapping[str, str], **of_task: Any) -> _Ended:
    """Run the task of a request's body. `names`: a task's field -> the caller's name. `of_task`: fields of the task.

    Raises Problem, InvalidTask and UnknownModel, in the caller's names.
    """
    gateway, tenant = gateway_of(request), tenant_of(request)
    try:
        task = Task(
            **{name: fields[name] for name in ("model", "truncate") if name in fields}
            | {"tier": SERVICE_TIERS[fields.get("service_tier", "auto")][0], "ttl": KEPT_S}
            | ({} if tenant is None else {"tenant": tenant})
            | of_task
        )
        request.state.tier = task.tier
        check_may_use(principal_of(request), task)
        resolved = await idempotency.resolve(request, gateway.client, task.model, 1, tenant=tenant)
        task.check(resolved.card)
        foreground = await keyed(request, gateway, [task])
        try:
            await foreground.submit()
            end = await answered(request, gateway, lambda: _end(foreground))
        finally:
            await foreground.close()
    except UnknownModel:
        raise
    except InvalidTask as error:
        message, param = in_callers_names(names, str(error), error.param)
        raise InvalidTask(message, param=param, code=error.code) from None
    except Problem as problem:
        problem.message, problem.param = in_callers_names(names, problem.message, problem.param)
        raise
    if end.result is None:
        raise Problem(500, "The task ended without a result.", code="failed")
    return _Ended(resolved, foreground, rows_of(end.result), end.usage["prompt_tokens"])


async def _end(foreground: Foreground) -> End:
    """The terminal entry. Raises as `Foreground.events`, which does so after it has given a failed task's."""
    end: End | None = None
    async with aclosing(foreground.only()) as batches:
        async for events in batches:
            end = next((event for event in events if isinstance(event, End)), end)
    if end is None:
        raise Problem(500, "The task's stream ended without an end.", code="failed")
    return end


def _sent(request: Request, ended: _Ended, body: bytes) -> Response:
    response = large.Sent([body], gateway_of(request).settings.stall)
    response.headers.update(idempotency.REPLAYED if ended.foreground.replayed else {})
    return response


async def _body(request: Request, schema: Mapping[str, Any], **checks: Callable[[Any, str], Any]) -> dict[str, Any]:
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    return await fields_of(request, gateway.settings.max_body, schema, checks)


def _any(value: Any, name: str) -> Any:
    """The value as it is: the task checks it."""
    return value


def _input(value: Any, name: str) -> Any:
    """A list of token ids is one text; the task checks the texts."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_INT32:
        raise InvalidTask(f"{name} is {shown(value)}; it must be an integer from 1 to {MAX_INT32}", param=name)
    return value


@router.post(
    "/v1/embeddings",
    dependencies=SUBMITS_TASKS,
    response_model=None,
    responses=_ANSWER,
    openapi_extra=_openapi(EMBEDDINGS),
)
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings: a vector for each text."""
    fields = await _body(request, EMBEDDINGS, input=_input, dimensions=_any)
    own = {name: fields[name] for name in ("input", "dimensions", "prompt_name") if name in fields}
    ended = await _ended(request, fields, {}, kind="embed", **own)
    encoded = fields.get("encoding_format", "float") == "base64"

    def answer() -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(row) if encoded else row.tolist()}
            for index, row in enumerate(ended.rows)
        ]
        return json.dumps({"object": "list", "data": data, "model": ended.model, "usage": ended.usage}).encode()

    return _sent(request, ended, await run_by_weight(ended.numbers, answer))


def _base64(row: array[float]) -> str:
    """Little-endian fp32 numbers in base64. All machines that are served on are little-endian."""
    return base64.b64encode(row.tobytes()).decode()


def _documents(value: Any, name: str) -> list[Any]:
    """Texts, or objects with a text."""
    if not isinstance(value, list) or not value:
        raise InvalidTask(f"{name} is {shown(value)}; it must be a list of texts", param=name, code="invalid_type")
    return [item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in value]


@router.post(
    "/v1/rerank",
    dependencies=SUBMITS_TASKS,
    response_model=None,
    responses=_ANSWER,
    openapi_extra=_openapi(RERANK),
)
@router.post(
    "/v2/rerank",
    dependencies=SUBMITS_TASKS,
    response_model=None,
    responses=_ANSWER,
    openapi_extra=_openapi(RERANK),
)
async def rerank(request: Request) -> Response:
    """Documents by their relevance to a query, the most relevant first, as Cohere and Jina answer."""
    fields = await _body(request, RERANK, documents=_documents, top_n=_count)
    documents = fields["documents"]
    own = {"query": fields["query"], "input": documents, "truncate": fields.get("truncate", True)}
    ended = await _ended(request, fields, {"input": "documents"}, kind="rerank", **own)
    scores = [row[0] for row in ended.rows]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.get("top_n")]
    returned = fields.get("return_documents", False)
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": documents[index]}} if returned else {})
        for index in order
    ]
    version = request.url.path.split("/")[1].removeprefix("v")
    body = {
        "id": f"rerank-{ended.foreground.ids[0]}",
        "model": ended.model,
        "results": results,
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
        "usage": ended.usage,
    }
    return _sent(request, ended, json.dumps(body).encode())


@router.post(
    "/v1/classify",
    dependencies=SUBMITS_TASKS,
    response_model=None,
    responses=_ANSWER,
    openapi_extra=_openapi(CLASSIFY),
)
async def classify(request: Request) -> Response:
    """The likeliest label of each text, with the probabilities of all, as vLLM answers."""
    fields = await _body(request, CLASSIFY, input=_input)
    ended = await _ended(request, fields, {}, kind="classify", input=fields["input"])
    labels = (ended.resolved.card.get("pooling") or {}).get("labels") or []

    def answer() -> bytes:
        data = []
        for index, row in enumerate(ended.rows):
            best = max(range(len(row)), key=row.__getitem__)
            label = labels[best] if len(labels) == len(row) else str(best)
            data.append({"index": index, "label": label, "probs": row.tolist(), "num_classes": len(row)})
        return json.dumps(_listed("classify", ended, data)).encode()

    return _sent(request, ended, await run_by_weight(ended.numbers, answer))


@router.post(
    "/v1/score",
    dependencies=SUBMITS_TASKS,
    response_model=None,
    responses=_ANSWER,
    openapi_extra=_openapi(SCORE),
)
async def score(request: Request) -> Response:
    """The score of a text with each of some others, as vLLM answers."""
    fields = await _body(request, SCORE, text_2=_any)
    names = {"query": "text_1", "input": "text_2"}
    own = {"query": fields["text_1"], "input": fields["text_2"], "truncate": fields.get("truncate", True)}
    ended = await _ended(request, fields, names, kind="rerank", **own)
    data = [{"index": index, "object": "score", "score": row[0]} for index, row in enumerate(ended.rows)]
    return _sent(request, ended, json.dumps(_listed("score", ended, data)).encode())


def _listed(prefix: str, ended: _Ended, data: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{ended.foreground.ids[0]}",
        "object": "list",
        "created": int(time.time()),
        "model": ended.model,
        "data": list(data),
        "usage": ended.usage,
    }
