"""`/api/tags`, `/api/show`, `/api/ps`, `/api/version`, `/api/pull`: what is served, as Ollama lists it.

Only what a model's card says is told: nobody here knows a model's size on disk, or its quantization.

A client of Ollama's appends `:latest` to a name without a tag, so names without one are listed with it. `MODEL:latest`
is the model, unless it has an adapter that is called `latest`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from producers.client.operations import takes_tasks
from producers.gateway.admission.limits import check_sees
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.http.authorization import READS, SUBMITS, principal_of
from producers.gateway.http.request_body import SETTINGS, documented, read_object
from producers.gateway.http.request_state import work_of
from producers.gateway.ollama.answer import LineStream, timestamp
from producers.gateway.ollama.request import MAX_MODEL, check_model
from producers.gateway.openai.parameters import flag
from producers.gateway.openai.reasoning import reasoning_model

router = APIRouter(prefix="/api", tags=["ollama"])

#: The release of Ollama whose API this is: clients look whether a server is new enough for what they ask.
VERSION: Final = "0.12.11"
#: The tag that clients append to names without one.
LATEST: Final = ":latest"
#: Age (s) up to which a reading of the workers will do.
MAX_AGE_S: Final = 5.0
MODEL: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": MAX_MODEL}
SHOW: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": MODEL, "verbose": {"type": "boolean", "description": "taken, and not used"}},
}
PULL: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["model"],
    "properties": {"model": MODEL, "stream": {"type": "boolean", "description": "unset: true"}},
}


class OllamaError(BaseModel):
    """An error in Ollama's form."""

    error: str
    code: str


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's responses for errors with these statuses, and with those that any request may get."""
    return {status: {"model": OllamaError} for status in (400, 401, 403, 408, 500, 503, *statuses)}


async def named(request: Request, gateway: Gateway, name: str) -> str:
    """The name of the model that a caller means, without Ollama's tag. Raises redis.exceptions.RedisError or
    OSError."""
    if not name.endswith(LATEST):
        return name
    client = gateway.client
    # Not by `resolve`: where there is no such name, as with most requests, that reads all models for its error.
    if principal_of(request).may_use(name) and await client.run(takes_tasks(name, client.patience)):
        return name
    return name.removesuffix(LATEST)


async def card_of(request: Request, gateway: Gateway, name: str) -> dict[str, Any]:
    """The card of the model that a caller means. Raises Problem and UnknownModel."""
    model = await named(request, gateway, name)
    check_sees(principal_of(request), model)
    return await gateway.client.card(model)


async def _cards(request: Request, gateway: Gateway) -> dict[str, dict[str, Any]]:
    """Listed name -> card of all models that the caller may use."""
    cards = [card for card in await gateway.client.models() if principal_of(request).may_use(card["name"])]
    names = {card["name"] for card in cards}
    return {_tagged(card["name"], names): card for card in cards}


def _tagged(name: str, names: Collection[str]) -> str:
    """A model's name with a tag, as clients write it. `names`: of all models; where one is called `latest`, an adapter
    or a model, or this one's name with the tag, the tag stands for that."""
    tagged = f"{name}{LATEST}"
    return name if ":" in name or LATEST[1:] in names or tagged in names else tagged


def _details(card: Mapping[str, Any]) -> dict[str, Any]:
    details = {
        "parent_model": card.get("parent") or "",
        "format": "",
        "family": card["architecture"],
        "families": [card["architecture"]],
        "parameter_size": _rounded(card["parameters"]),
        "quantization_level": "",
        "context_length": card["context_length"],
    }
    dimensions = (card.get("pooling") or {}).get("dimensions")
    return details if dimensions is None else details | {"embedding_length": dimensions}


def _rounded(parameters: int) -> str:
    """A number of parameters as Ollama writes it: 27.5M, 1.2B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _digest(card: Mapping[str, Any]) -> str:
    """Another one for each version: of its name, since a card has no digest of a model's files."""
    adapter = (card.get("adapter") or {}).get("version", "")
    return hashlib.sha256(f"{card['name']}@{card['version']}:{adapter}".encode()).hexdigest()


def _entry(name: str, card: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "model": name, "size": 0, "digest": _digest(card), "details": _details(card)}


@router.get("/tags", dependencies=READS, response_model=None, responses=errors())
async def tags(request: Request) -> JSONResponse:
    """List the models that the caller may use, as Ollama does."""
    cards = await _cards(request, gateway_of(request))
    models = [_entry(name, card) | {"modified_at": timestamp(card["created"])} for name, card in cards.items()]
    return JSONResponse({"models": models})


@router.get("/ps", dependencies=READS, response_model=None, responses=errors())
async def running(request: Request) -> JSONResponse:
    """List the models that a worker has loaded, as of some seconds ago."""
    gateway = gateway_of(request)
    reading = await gateway.samples.latest(MAX_AGE_S)
    served = {pool.model for pool in reading.fleet.pools if pool.workers}
    cards = await _cards(request, gateway)
    models = [
        _entry(name, card) | {"size_vram": 0, "context_length": card["context_length"]}
        for name, card in cards.items()
        if (card.get("parent") or card["name"]) in served
    ]
    return JSONResponse({"models": models})


@router.get("/version", dependencies=READS, response_model=None, responses=errors())
async def version(request: Request) -> JSONResponse:
    """The release of Ollama whose API this is."""
    return JSONResponse({"version": VERSION})


@router.post("/show", dependencies=SUBMITS, response_model=None, responses=errors(404), openapi_extra=documented(SHOW))
async def show(request: Request) -> JSONResponse:
    """Tell what is known of a model, in Ollama's form."""
    gateway = gateway_of(request)
    body = await read_object(request, min(gateway.settings.max_body, SETTINGS))
    card = await card_of(request, gateway, check_model(body, "model", "name"))
    architecture = card["architecture"]
    known = {
        "general.architecture": architecture,
        "general.basename": card["name"],
        "general.parameter_count": card["parameters"],
        f"{architecture}.context_length": card["context_length"],
        f"{architecture}.vocab_size": card["vocab_size"],
    }
    dimensions = (card.get("pooling") or {}).get("dimensions")
    if dimensions is not None:
        known[f"{architecture}.embedding_length"] = dimensions
    usual = {"num_ctx": card["context_length"], **card.get("defaults", {})}
    usual = {"repeat_penalty" if name == "repetition_penalty" else name: value for name, value in usual.items()}
    return JSONResponse(
        {
            "modelfile": "",
            "parameters": "\n".join(f"{name:<30} {value}" for name, value in usual.items()),
            "template": "",
            "details": _details(card),
            "model_info": known,
            "capabilities": await _capabilities(request, gateway, card),
            "modified_at": timestamp(card["created"]),
        }
    )


async def _capabilities(request: Request, gateway: Gateway, card: Mapping[str, Any]) -> list[str]:
    """Ollama's words for what a model can do. Raises Problem, InvalidTask, and as `reasoning_model`."""
    work_of(request)
    if "embed" in card["capabilities"]:
        return ["embedding"]
    if "generate" not in card["capabilities"]:
        return []
    if "chat" not in card["capabilities"]:
        return ["completion"]
    reasons = await reasoning_model(gateway.templates, gateway.prompts, card) is not None
    return ["completion", "tools", *(["thinking"] if reasons else [])]


@router.post("/pull", dependencies=SUBMITS, response_model=None, responses=errors(404), openapi_extra=documented(PULL))
async def pull(request: Request) -> Response:
    """Say that a model is there, for clients that pull each one before they use it. Nothing is loaded."""
    gateway = gateway_of(request)
    body = await read_object(request, min(gateway.settings.max_body, SETTINGS))
    await card_of(request, gateway, check_model(body, "model", "name"))
    lines = body.get("stream") is None or flag(body, "stream")
    return Response(b'{"status":"success"}\n', media_type=LineStream.media_type if lines else "application/json")
