"""`/v1/embeddings`, `/v1/rerank`, `/v2/rerank`, `/v1/score`, `/v1/classify`, `/v1/token_classify`: models that generate
nothing.

body -> one task with all texts (a worker counts their tokens) -> its terminal entry, with a row for each text -> answer
                                    of a task in chunks (`producers.store.chunks`): a chunk's rows at a time ──▶ answer

A line of a batch is read and answered by the same `Endpoint` (`producers.gateway.openai.batch_lines`).
"""

from __future__ import annotations

import base64
import json
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.declared import MAX_INT32
from engine.errors import TextError
from engine.labels import Aggregation
from producers.contract import model_fit
from producers.contract.fields import MAX_PROMPT_BYTES, MAX_TEXTS
from producers.contract.stream import Chunk, End, Row, error_view, rows_of
from producers.contract.task import Task
from producers.errors import InvalidTask, shown
from producers.gateway.admission.limits import check_may_use
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import PARAMETER, SUBMITS_TASKS, principal_of, tenant_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import checked, checked_fields, documented, fields_of
from producers.gateway.openai.answer import run_by_weight
from producers.gateway.openai.parameters import KEPT_S, SERVICE_TIERS, TRUNCATE, naming
from producers.gateway.tasks import large
from producers.gateway.tasks.foreground import Foreground, answered, keyed
from producers.gateway.tasks.views import errors

router = APIRouter(tags=["openai"])

_TEXT: Final = {"type": "string", "minLength": 1, "maxLength": MAX_PROMPT_BYTES}
_TEXTS: Final = {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": _TEXT}
_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": MAX_INT32}}
_INPUT: Final = {
    "description": "a text, token ids, or a list of either",
    "anyOf": [
        _TEXT,
        _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": {"anyOf": [_TEXT, _IDS]}},
    ],
}
#: What all of these endpoints take.
_EVERY: Final[dict[str, Any]] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 200},
    "service_tier": {"type": "string", "enum": list(SERVICE_TIERS)},
    "truncate": {"type": "boolean", "description": "cut texts that are too long"},
    "truncate_prompt_tokens": {"type": "integer", "enum": [-1], "description": "truncate: true, as vLLM's clients say"},
    "on_error": {"type": "string", "enum": ["request", "item"], "description": "what a bad text fails"},
    "user": {"type": "string", "description": "taken, and not used"},
    "modality": {"type": "string", "enum": ["text"], "description": "what infinity's clients say"},
}


def _schema(required: Sequence[str], **task_fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["model", *required],
        "properties": {**_EVERY, **task_fields},
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The results that workers made of a task's texts. `card`: of its model. `rows`: one for each text. `tokens`: of
    all texts. `created`: unix time (s)."""

    task_id: str
    card: Mapping[str, Any]
    rows: Sequence[Row]
    tokens: int
    created: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.tokens, "total_tokens": self.tokens}

    @property
    def numbers(self) -> int:
        return sum(len(row) for row in self.rows if not isinstance(row, TextError))

    def vectors(self) -> list[array[float] | TextError]:
        """The rows, where they are numbers. Raises Problem if the task made something else."""
        if any(isinstance(row, tuple) for row in self.rows):
            raise Problem(500, "The task's result is not of its kind.", code="failed")
        return [row for row in self.rows if not isinstance(row, tuple)]

    def listed(self, prefix: str, data: Sequence[Mapping[str, Any]]) -> bytes:
        """An answer in vLLM's form."""
        answer = {
            "id": f"{prefix}-{self.task_id}",
            "object": "list",
            "created": self.created,
            "model": self.card["name"],
            "data": data,
            "usage": self.usage,
        }
        return json.dumps(answer).encode()


#: An answer's entries as JSON, of the body's fields, what was made of some of its texts, and the number of the first of
#: these.
Entries = Callable[[Mapping[str, Any], PooledRows, int], list[str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The request of an endpoint, the task that it becomes, and the answer.

    `schema`: of its body. `texts`: a task's field -> the body's. `answer`: the answer's body, in ASCII, of the body's
    fields and what was made. `checks`: as of `fields_of`. `cuts`: too long texts are cut, unless the body says no.
    `entries`: of an answer that has one for each text in order, in its list `listed`: those of some rows, from this
    text on. `options`: fields of the task that the body has under the same names.
    """

    kind: str
    schema: Mapping[str, Any]
    texts: Mapping[str, str]
    answer: Callable[[Mapping[str, Any], PooledRows], bytes]
    checks: Mapping[str, Callable[[Any, str], Any]] = field(default_factory=dict)
    cuts: bool = False
    entries: Entries | None = None
    options: Sequence[str] = ()
    listed: str = "data"

    def fields(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a body that is read. Raises InvalidTask."""
        return checked_fields(body, self.schema, self.checks)

    def task(self, fields: Mapping[str, Any], **more: Any) -> Task:
        """The task of a body's fields. `more`: fields of the task, which go first. Raises InvalidTask."""
        task_fields = {ours: fields[theirs] for ours, theirs in self.texts.items() if theirs in fields}
        task_fields |= {name: fields[name] for name in ("model", "on_error", *self.options) if name in fields}
        dimensions = task_fields.get("dimensions")
        if "modality" in fields and type(dimensions) is int and dimensions == 0:  # infinity's clients: all
            del task_fields["dimensions"]
        limit = fields.get(TRUNCATE)
        if limit is not None and limit != -1:
            raise InvalidTask(
                f"{TRUNCATE} is {shown(limit)}; it must be -1: texts are cut to the tokens that the model takes",
                param=TRUNCATE,
            )
        truncate = fields.get("truncate", self.cuts or limit == -1)
        if limit == -1 and not truncate:
            raise InvalidTask(f"{TRUNCATE} is -1, and truncate is false; give one of them", param=TRUNCATE)
        task_fields |= {"truncate": truncate, "ttl": KEPT_S}
        task_fields["tier"] = SERVICE_TIERS[fields.get("service_tier", "auto")][0]
        with self.naming():
            return Task(**{**task_fields, "kind": self.kind, **more})

    def naming(self) -> AbstractContextManager[None]:
        """Errors raised within have the body's names."""
        return naming(self.texts)


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


def _activated(value: Any, name: str) -> bool:
    """What infinity's clients say: whether scores are those before the model's activation, which is not offered."""
    if value is not False:
        raise InvalidTask(f"{name} is {shown(value)}; it must be false: scores are probabilities", param=name)
    return value


def _documents(value: Any, name: str) -> list[Any]:
    """Texts, or objects with a text."""
    if not isinstance(value, list) or not value:
        raise InvalidTask(f"{name} is {shown(value)}; it must be a list of texts", param=name, code="invalid_type")
    return [item["text"] if isinstance(item, dict) and item.keys() == {"text"} else item for item in value]


def _base64(row: array[float]) -> str:
    """Little-endian fp32 numbers in base64. All machines that are served on are little-endian."""
    return base64.b64encode(row.tobytes()).decode()


def decimal(row: array[float]) -> str:
    """fp32 numbers as JSON. Nine digits tell each from all others, in a third of the time of the digits of a double."""
    return f"[{', '.join(['%.9g'] * len(row))}]" % tuple(row)


def _embeddings(fields: Mapping[str, Any], pooled: PooledRows, first: int) -> list[str]:
    encoded = fields.get("encoding_format", "float") == "base64"
    return [
        json.dumps({"object": "embedding", "index": index, "embedding": "" if encoded else [], **error_view(row)})
        if isinstance(row, TextError)
        else f'{{"object": "embedding", "index": {index}, "embedding": '
        + (f'"{_base64(row)}"}}' if encoded else f"{decimal(row)}}}")
        for index, row in enumerate(pooled.vectors(), first)
    ]


def _embedded(fields: Mapping[str, Any], pooled: PooledRows) -> bytes:
    data = ", ".join(_embeddings(fields, pooled, 0))
    model, usage = json.dumps(pooled.card["name"]), json.dumps(pooled.usage)
    return f'{{"object": "list", "data": [{data}], "model": {model}, "usage": {usage}}}'.encode()


def _ranked(version: str) -> Callable[[Mapping[str, Any], PooledRows], bytes]:
    """The answer of this version of Cohere's endpoint."""

    def answer(fields: Mapping[str, Any], pooled: PooledRows) -> bytes:
        rows = pooled.vectors()
        scores = {index: row[0] for index, row in enumerate(rows) if not isinstance(row, TextError)}
        errors = [{"index": at, **error_view(row)} for at, row in enumerate(rows) if isinstance(row, TextError)]
        documents = fields["documents"]
        order = sorted(scores, key=lambda index: -scores[index])[: fields.get("top_n")]
        returned = fields.get("return_documents", False)
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if returned else {})
            for index in order
        ]
        body = {
            "id": f"rerank-{pooled.task_id}",
            "model": pooled.card["name"],
            "results": results,
            "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
            "usage": pooled.usage,
        }
        return json.dumps(body | ({"errors": errors} if errors else {})).encode()

    return answer


def _classes(fields: Mapping[str, Any], pooled: PooledRows, first: int) -> list[dict[str, Any]]:
    labels = (pooled.card.get("pooling") or {}).get("labels") or []
    data = []
    threshold = fields.get("threshold")
    for index, row in enumerate(pooled.vectors(), first):
        if isinstance(row, TextError):
            data.append({"index": index, "label": None, "probs": [], "num_classes": 0, **error_view(row)})
            continue
        order = sorted(range(len(row)), key=row.__getitem__, reverse=True)
        names = labels if len(labels) == len(row) else [*map(str, range(len(row)))]
        entry = {"index": index, "label": names[order[0]], "probs": row.tolist(), "num_classes": len(row)}
        if threshold is not None:
            entry["labels"] = [{"label": names[at], "score": row[at]} for at in order if row[at] >= threshold]
        data.append(entry)
    return data


def _entities(fields: Mapping[str, Any], pooled: PooledRows, first: int) -> list[dict[str, Any]]:
    texts = fields["input"]
    data: list[dict[str, Any]] = []
    for index, row in enumerate(pooled.rows, first):
        if not isinstance(row, tuple):
            data.append({"index": index, "entities": [], **(error_view(row) if isinstance(row, TextError) else {})})
            continue
        text = texts if isinstance(texts, str) else texts[index]
        entities = [asdict(entity) | {"text": text[entity.start : entity.end]} for entity in row]
        data.append({"index": index, "entities": entities})
    return data


def _labelled(fields: Mapping[str, Any], pooled: PooledRows) -> bytes:
    return pooled.listed("token-classify", _entities(fields, pooled, 0))


def _dumped(entries: Callable[[Mapping[str, Any], PooledRows, int], list[dict[str, Any]]]) -> Entries:
    return lambda fields, pooled, first: [*map(json.dumps, entries(fields, pooled, first))]


def _classified(fields: Mapping[str, Any], pooled: PooledRows) -> bytes:
    return pooled.listed("classify", _classes(fields, pooled, 0))


def _scored(fields: Mapping[str, Any], pooled: PooledRows) -> bytes:
    data = [
        {"index": index, "object": "score", "score": None, **error_view(row)}
        if isinstance(row, TextError)
        else {"index": index, "object": "score", "score": row[0]}
        for index, row in enumerate(pooled.vectors())
    ]
    return pooled.listed("score", data)


_EMBEDDINGS: Final = _schema(
    ["input"],
    input=_INPUT,
    encoding_format={"type": "string", "enum": ["float", "base64"]},
    dimensions={"type": "integer", "minimum": 1, "maximum": MAX_INT32},
    prompt_name={"type": "string", "minLength": 1, "maxLength": 200, "description": "one of the model's prompts"},
)
_RAW: Final = {"type": "boolean", "enum": [False], "description": "what infinity's clients say"}
_RERANK: Final = _schema(
    ["query", "documents"],
    query=_TEXT,
    documents={
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_TEXTS,
        "items": {
            "anyOf": [
                _TEXT,
                {"type": "object", "required": ["text"], "properties": {"text": _TEXT}, "additionalProperties": False},
            ]
        },
    },
    top_n={"type": "integer", "minimum": 1, "maximum": MAX_INT32},
    return_documents={"type": "boolean"},
    raw_scores=_RAW,
)
_DOCUMENTS: Final = {"query": "query", "input": "documents"}
_OF_RERANK: Final = {"documents": _documents, "top_n": _count, "raw_scores": _activated}
_THRESHOLD: Final = {"type": "number", "minimum": 0, "maximum": 1}
EMBEDDINGS, RERANK, CLASSIFY, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/classify", "/v1/score"
TOKEN_CLASSIFY = "/v1/token_classify"  # noqa: S105 (a path)
#: Path -> its endpoint.
ENDPOINTS: Final = {
    EMBEDDINGS: Endpoint(
        "embed",
        _EMBEDDINGS,
        {"input": "input"},
        _embedded,
        {"input": _input, "dimensions": _any},
        entries=_embeddings,
        options=("dimensions", "prompt_name"),
    ),
    RERANK: Endpoint("rerank", _RERANK, _DOCUMENTS, _ranked("1"), _OF_RERANK, cuts=True),
    "/v2/rerank": Endpoint("rerank", _RERANK, _DOCUMENTS, _ranked("2"), _OF_RERANK, cuts=True),
    CLASSIFY: Endpoint(
        "classify",
        _schema(
            ["input"],
            input=_INPUT,
            threshold=_THRESHOLD | {"description": "list the labels from this probability on"},
            raw_scores=_RAW,
        ),
        {"input": "input"},
        _classified,
        {"input": _input, "raw_scores": _activated},
        entries=_dumped(_classes),
    ),
    TOKEN_CLASSIFY: Endpoint(
        "token_classify",
        _schema(
            ["input"],
            input={"anyOf": [_TEXT, _TEXTS]},
            aggregation_strategy={"type": "string", "enum": list(get_args(Aggregation))},
            threshold=_THRESHOLD | {"description": "the least score of an entity"},
        ),
        {"input": "input"},
        _labelled,
        {"input": _any},
        entries=_dumped(_entities),
        options=("aggregation_strategy", "threshold"),
    ),
    SCORE: Endpoint(
        "rerank",
        _schema(["text_1", "text_2"], text_1=_TEXT, text_2={"anyOf": [_TEXT, _TEXTS]}),
        {"query": "text_1", "input": "text_2"},
        _scored,
        {"text_2": _any},
        cuts=True,
    ),
}
_ANSWER: Final = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}}},
    **errors(404, 409, 413, 415, 422, 429, 504),
}


def _openapi(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": [PARAMETER, idempotency.PARAMETER], **documented(schema)}


async def _answer(request: Request) -> Response:
    """Run the task of a request's body, and answer. Raises as `pooled`."""
    endpoint, gateway = ENDPOINTS[request.url.path], gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    fields = await fields_of(request, gateway.settings.max_body, endpoint.schema, endpoint.checks)
    return await pooled(request, gateway, endpoint, fields)


async def pooled(request: Request, gateway: Gateway, endpoint: Endpoint, fields: Mapping[str, Any]) -> Response:
    """Run the task of a body's fields, and answer. Raises Problem, InvalidTask and UnknownModel, in the caller's
    names."""
    tenant = tenant_of(request)
    task_fields = {} if tenant is None else {"tenant": tenant}
    task = await checked(request, lambda: endpoint.task(fields, **task_fields))
    with endpoint.naming():
        request.state.tier = task.tier
        check_may_use(principal_of(request), task)
        resolved = await idempotency.resolve(request, gateway.client, task, 1, tenant=tenant)
        model_fit.check(task, resolved.card)
        foreground = await keyed(request, gateway, [task])
        try:
            await foreground.submit()
            chunks, end = await answered(request, gateway, lambda: _end(foreground))
        finally:
            await foreground.close()
    if end.result is None and not chunks:
        raise Problem(500, "The task ended without a result.", code="failed")
    card = (foreground.resolved or resolved).card
    pooled_rows = PooledRows(foreground.ids[0], card, (), end.usage["prompt_tokens"], int(time.time()))
    response: Response
    if end.result is not None:
        response = await _sent(endpoint, gateway, fields, replace(pooled_rows, rows=rows_of(end.result)))
    elif endpoint.entries is None:
        rows = [row for chunk in chunks for row in await gateway.client.rows(chunk)]
        response = await _sent(endpoint, gateway, fields, replace(pooled_rows, rows=rows))
    else:
        release = await large.turn(gateway, gateway.settings.patience)
        pieces = _pieces(endpoint, endpoint.entries, gateway, fields, pooled_rows, chunks)
        response = large.Streamed(pieces, gateway.settings.stall, release)
    response.headers.update(idempotency.REPLAYED if foreground.replayed else {})
    return response


async def _sent(endpoint: Endpoint, gateway: Gateway, fields: Mapping[str, Any], pooled: PooledRows) -> Response:
    body = await run_by_weight(pooled.numbers, lambda: endpoint.answer(fields, pooled))
    return large.Sent([body], gateway.settings.stall)


async def _pieces(
    endpoint: Endpoint,
    entries: Entries,
    gateway: Gateway,
    fields: Mapping[str, Any],
    pooled: PooledRows,
    chunks: Sequence[Chunk],
) -> AsyncGenerator[bytes]:
    """The answer's JSON, a chunk's entries at a time. `pooled`: without rows."""
    name = f'"{endpoint.listed}": ['.encode()
    before, _, after = endpoint.answer(fields, pooled).partition(name + b"]")  # no string's text can have such quotes
    yield before + name
    for chunk in chunks:
        task_fields = replace(pooled, rows=await gateway.client.rows(chunk))
        encoded = await run_by_weight(
            task_fields.numbers, partial(_encoded, entries, fields, task_fields, chunk.offset)
        )
        yield (b", " if chunk.number else b"") + encoded
    yield b"]" + after


def _encoded(entries: Entries, fields: Mapping[str, Any], pooled: PooledRows, first: int) -> bytes:
    return ", ".join(entries(fields, pooled, first)).encode()


async def _end(foreground: Foreground) -> tuple[list[Chunk], End]:
    """The entries of chunks, and the terminal one. Raises as `Foreground.events`, which does so after it has given a
    failed task's."""
    end: End | None = None
    chunks: list[Chunk] = []
    async with aclosing(foreground.only()) as batches:
        async for events in batches:
            chunks += [event for event in events if isinstance(event, Chunk)]
            end = next((event for event in events if isinstance(event, End)), end)
    if end is None:
        raise Problem(500, "The task's stream ended without an end.", code="failed")
    return chunks, end


def _post(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the handler of one of ENDPOINTS."""
    return router.post(
        path,
        dependencies=SUBMITS_TASKS,
        response_model=None,
        responses=_ANSWER,
        openapi_extra=_openapi(ENDPOINTS[path].schema),
    )


@_post(EMBEDDINGS)
async def embeddings(request: Request) -> Response:
    """OpenAI's embeddings: a vector for each text."""
    return await _answer(request)


@_post(RERANK)
@_post("/v2/rerank")
async def rerank(request: Request) -> Response:
    """Documents by their relevance to a query, the most relevant first, as Cohere and Jina answer."""
    return await _answer(request)


@_post(CLASSIFY)
async def classify(request: Request) -> Response:
    """The likeliest label of each text, with the probabilities of all, as vLLM answers."""
    return await _answer(request)


@_post(TOKEN_CLASSIFY)
async def token_classify(request: Request) -> Response:
    """The labelled parts of each text, such as names, with the numbers of their characters."""
    return await _answer(request)


@_post(SCORE)
async def score(request: Request) -> Response:
    """The score of a text with each of some others, as vLLM answers."""
    return await _answer(request)
