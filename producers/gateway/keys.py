"""`/v1/keys` and `/v1/audit`, for keys of the scope admin: who may do what, and who changed it.

body -> producers.admin.keys: checked, changed with its audit entry -> views, without secrets

Times are unix seconds, unless said otherwise.
"""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from redis.asyncio import Redis

from producers.admin import keys as admin
from producers.admin.keys import (
    CHANGEABLE,
    LONGEST_S,
    MAX_LIMIT,
    MAX_MODELS,
    MAX_MONEY,
    MAX_NAME,
    MAX_OVERLAP_S,
    USUAL,
    KeyEnded,
    view,
)
from producers.contract import keys
from producers.contract.fields import MAX_TENANT
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import ADMINISTERS, actor_of
from producers.gateway.http.errors import ONCE, Problem, invalid_value
from producers.gateway.http.request_body import documented, fields_of, read_object
from producers.gateway.tasks.views import errors
from producers.store.access import api_keys, audit
from producers.store.access.api_keys import MAX_KEYS, OVERLAP_S, SCOPES, Key, TooManyKeys

LIMITS: dict[str, str] = {
    "rpm": "most tasks that may be submitted in a minute",
    "tpm": "most tokens that the tasks of a minute may need",
    "max_in_flight": "most tasks that have not ended",
    "budget_tokens": "most tokens in a month (UTC)",
    "max_prompt": "most tokens of a prompt",
    "max_output": "most tokens of a choice's output",
    "max_waiting": "most of its tasks that wait for a worker",
    "max_streams": "most streams and waiting requests that are open at one gateway",
    "shorten_to": "most tokens of a choice's output under overload, of the default tier",
}
KEPT: dict[str, str] = {
    "max_file_bytes": "most bytes of all files that are kept",
    "max_files": "most files that are kept",
    "max_batches": "most batches that have not ended",
    "max_lines": "most lines of batches that wait, run, or are to be written",
    "max_endpoints": "most webhook endpoints",
    "max_task_bytes": "most bytes of tasks and their results that are kept",
    "max_idempotency_keys": "most idempotency keys that begin within a day",
}
MONEY: dict[str, Any] = {
    "type": ["string", "number"],
    "description": f"most that a month's tasks (UTC) may cost, in the currency of the prices; up to {MAX_MONEY}",
}
ROTATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "overlap": {
            "type": "number",
            "minimum": 0,
            "maximum": MAX_OVERLAP_S,
            "description": f"seconds for which the old secret still works; unset: {OVERLAP_S}",
        }
    },
}
router = APIRouter(prefix="/v1", tags=["keys"], dependencies=ADMINISTERS)
#: The beginning of an id, or of a key up to its secret: URLs are in logs.
BEGINNING: Final = re.compile(f"(?:{api_keys.PREFIX})?[0-9a-z]{{0,16}}")
#: Changes that are shown, unless asked for otherwise, and the most.
PAGE, MAX_PAGE = 100, 1000


def _names(maximum: int, description: str, allowed: tuple[str, ...] = ()) -> dict[str, Any]:
    items: dict[str, Any] = {"type": "string", "enum": list(allowed)} if allowed else {"type": "string", "minLength": 1}
    return {"type": "array", "minItems": 1, "maxItems": maximum, "items": items, "description": description}


def count(description: str) -> dict[str, Any]:
    """The schema of a limit."""
    return {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "description": f"{description}; unset: no limit"}


#: Those of a key, and those of a tenant alone.
LIMIT_SCHEMAS: dict[str, Any] = {
    **{name: count(description) for name, description in LIMITS.items()},
    "budget_money": MONEY,
}

KEPT_SCHEMAS: dict[str, Any] = {
    name: {**count(description), "description": f"{description}; unset: the gateway's"}
    for name, description in KEPT.items()
}

CREATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["tenant"],
    "properties": {
        "tenant": {"type": "string", "minLength": 1, "maxLength": MAX_TENANT},
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "unset: the tenant"},
        "scopes": _names(len(SCOPES), f"unset: {', '.join(USUAL)}", tuple(SCOPES)),
        "models": _names(MAX_MODELS, "the models that it may use; unset: all"),
        "tiers": _names(len(keys.TIERS), "the tiers that it may use; unset: all", tuple(keys.TIERS)),
        "expires_at": {
            "type": "integer",
            "description": f"unix seconds, at most {LONGEST_S // (365 * 24 * 3600)} years ahead; unset: never",
        },
        **LIMIT_SCHEMAS,
    },
}


def nullable(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of a body that changes some of these fields; null unsets one."""
    properties = {
        name: {**schema, "type": [*([schema["type"]] if isinstance(schema["type"], str) else schema["type"]), "null"]}
        for name, schema in properties.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


CHANGE = nullable({name: CREATE["properties"][name] for name in CHANGEABLE if name != "name"})
CHANGE["properties"]["name"] = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}


class LimitsView(BaseModel):
    """Limits; null: none."""

    rpm: int | None
    tpm: int | None
    max_in_flight: int | None
    budget_tokens: int | None
    budget_money: str | None
    max_prompt: int | None
    max_output: int | None
    max_waiting: int | None
    max_streams: int | None


class TenantLimits(LimitsView):
    """The limits that all keys of a tenant share."""

    object: Literal["tenant_limits"] = "tenant_limits"
    tenant: str
    max_file_bytes: int | None
    max_files: int | None
    max_batches: int | None
    max_lines: int | None
    max_endpoints: int | None
    max_task_bytes: int | None
    max_idempotency_keys: int | None


class KeyView(LimitsView):
    """An API key, without its secret."""

    id: str
    object: Literal["api_key"] = "api_key"
    tenant: str
    name: str
    scopes: list[str]
    models: list[str] = Field(description="the models that it may use; empty: all")
    tiers: list[str] = Field(description="the tiers that it may use; empty: all")
    shorten_to: int | None
    state: Literal["active", "disabled", "expired", "revoked"]
    created_at: int
    expires_at: int | None
    disabled_at: int | None
    revoked_at: int | None
    old_secret_until: int | None = Field(description="until when the secret before the last rotation works, too")

    @classmethod
    def of(cls, record: Key, **more: Any) -> Self:
        return cls(**view(record, time.time()), **more)


class KeyWithSecret(KeyView):
    key: str = Field(description="what its holder sends; it is shown this once")


class KeyList(BaseModel):
    object: Literal["list"] = "list"
    data: list[KeyView]


class ChangeView(BaseModel):
    """A change of a key, a webhook endpoint, a webhook secret or a model's version."""

    at: int = Field(description="unix milliseconds")
    by: str = Field(description="a key's id, `local` for a caller without one, `cli:USER@HOST`, or a process")
    did: str
    what: str
    tenant: str | None = None
    address: str | None = None


class ChangeList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ChangeView]


@router.post("/keys", response_model=KeyWithSecret, responses=errors(413, 415), openapi_extra=documented(CREATE))
async def create(request: Request) -> KeyWithSecret:
    """Make a key. The answer alone shows it; a key whose answer was lost is of use to nobody, and can be revoked."""
    gateway = gateway_of(request)
    fields = await read_object(request, gateway.settings.max_body)
    try:
        key, token = await admin.create(gateway.client.store, fields, actor_of(request))
    except TooManyKeys:
        raise Problem(400, f"There are {MAX_KEYS} keys, the most; revoke one first.", code="too_many_keys") from None
    return KeyWithSecret.of(key, key=token)


@router.get("/keys", response_model=KeyList)
async def listed(
    request: Request,
    prefix: Annotated[str, Query(description="the beginning of their ids")] = "",
    tenant: Annotated[str | None, Query(description="keys of this tenant")] = None,
) -> KeyList:
    """List all keys, the newest first."""
    if not BEGINNING.fullmatch(prefix):  # what was sent instead may be a secret, which no answer repeats
        raise invalid_value("prefix", "prefix must be the beginning of a key's id, without its secret")
    matches = await admin.matching(_store(request), prefix, tenant)
    return KeyList(data=[KeyView.of(key) for key in matches])


@router.get("/keys/{key_id}", response_model=KeyView, responses=errors(404))
async def look(request: Request, key_id: str) -> KeyView:
    """Get a key, without its secret."""
    return KeyView.of(_existing(await api_keys.get(_store(request), key_id), key_id))


@router.post(
    "/keys/{key_id}", response_model=KeyView, responses=errors(404, 409, 413, 415), openapi_extra=documented(CHANGE)
)
async def change(request: Request, key_id: str) -> KeyView:
    """Change a key's limits, name, models, tiers or end: on every gateway within a second. Null unsets a field."""
    fields = await read_object(request, gateway_of(request).settings.max_body)
    try:
        return KeyView.of(_existing(await admin.change(_store(request), key_id, fields, actor_of(request)), key_id))
    except KeyEnded as error:
        raise _ended(error) from None


@router.post(
    "/keys/{key_id}/rotate",
    response_model=KeyWithSecret,
    responses=errors(404, 409, 413, 415),
    openapi_extra=documented(ROTATE, required=False),
)
async def rotate(request: Request, key_id: str) -> KeyWithSecret:
    """Give a key a new secret, shown this once. The old one goes on for 24 hours, unless told otherwise."""
    fields = await fields_of(request, gateway_of(request).settings.max_body, ROTATE, optional=True)
    try:
        rotated = await admin.rotate(_store(request), key_id, fields.get("overlap", OVERLAP_S), actor_of(request))
    except KeyEnded as error:
        raise _ended(error) from None
    if rotated is None:
        raise _missing(key_id)
    return KeyWithSecret.of(rotated[0], key=rotated[1])


@router.post("/keys/{key_id}/disable", response_model=KeyView, responses=errors(404, 409))
async def disable(request: Request, key_id: str) -> KeyView:
    """Let a key in no more until it is enabled; on every gateway within a second."""
    return await _turned(request, key_id, "disable")


@router.post("/keys/{key_id}/enable", response_model=KeyView, responses=errors(404, 409))
async def enable(request: Request, key_id: str) -> KeyView:
    """Let a key that was disabled in again."""
    return await _turned(request, key_id, "enable")


@router.post("/keys/{key_id}/revoke", response_model=KeyView, responses=errors(404))
async def revoke(request: Request, key_id: str) -> KeyView:
    """End a key for good; on every gateway within a second."""
    return await _turned(request, key_id, "revoke")


@router.get("/audit", response_model=ChangeList)
async def changes(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most changes to answer with")] = PAGE,
) -> ChangeList:
    """List who made, changed or removed keys, webhook endpoints and secrets, models' versions: the latest first."""
    return ChangeList(data=[ChangeView(**change) for change in await audit.latest(_store(request), limit)])


async def _turned(request: Request, key_id: str, verb: str) -> KeyView:
    try:
        return KeyView.of(_existing(await admin.turn(_store(request), key_id, verb, actor_of(request)), key_id))
    except KeyEnded as error:
        raise _ended(error) from None


def _store(request: Request) -> Redis:
    return gateway_of(request).client.store


def _existing(key: Key | None, key_id: str) -> Key:
    if key is None:
        raise _missing(key_id)
    return key


def _missing(key_id: str) -> Problem:
    return Problem(404, f"There is no key {shown(api_keys.without_secret(key_id))}.", code="key_not_found")


def _ended(error: KeyEnded) -> Problem:
    return Problem(409, str(error), code="key_ended", headers=ONCE)
