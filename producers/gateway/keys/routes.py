"""The routes of `/v1/keys` and `/v1/audit`."""

from __future__ import annotations

import re
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from redis.asyncio import Redis

from producers.admin import keys as admin
from producers.admin.keys import KeyEnded
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http.caller import ADMINISTERS, actor_of
from producers.gateway.http.errors import ONCE, Problem, invalid_value
from producers.gateway.http.request.body import read_object
from producers.gateway.http.request.fields import documented, fields_of
from producers.gateway.keys.views import CHANGE, CREATE, ROTATE, ChangeList, ChangeView, KeyList, KeyView, KeyWithSecret
from producers.gateway.tasks.views import errors
from producers.store.access import api_keys, audit
from producers.store.access.api_keys import MAX_KEYS, OVERLAP_S, Key, TooManyKeys

router = APIRouter(prefix="/v1", tags=["keys"], dependencies=ADMINISTERS)

#: The beginning of an id, or of a key up to its secret: URLs are in logs.
BEGINNING: Final = re.compile(f"(?:{api_keys.PREFIX})?[0-9a-z]{{0,16}}")
#: Changes that are shown, unless asked for otherwise, and the most.
PAGE, MAX_PAGE = 100, 1000


@router.post("/keys", response_model=KeyWithSecret, responses=errors(413, 415), openapi_extra=documented(CREATE))
async def create(request: Request) -> KeyWithSecret:
    """Make a key. The answer alone shows it; a key whose answer was lost is of use to nobody, and can be revoked."""
    gateway = gateway_of(request)
    asked = await read_object(request, gateway.settings.max_body)
    try:
        key, token = await admin.create(gateway.client.store, asked, actor_of(request))
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
    found = await admin.found(_store(request), prefix, tenant)
    return KeyList(data=[KeyView.of(one) for one in found])


@router.get("/keys/{key_id}", response_model=KeyView, responses=errors(404))
async def look(request: Request, key_id: str) -> KeyView:
    """Get a key, without its secret."""
    return KeyView.of(_found(await api_keys.get(_store(request), key_id), key_id))


@router.post(
    "/keys/{key_id}", response_model=KeyView, responses=errors(404, 409, 413, 415), openapi_extra=documented(CHANGE)
)
async def change(request: Request, key_id: str) -> KeyView:
    """Change a key's limits, name, models, tiers or end: on every gateway within a second. Null unsets a field."""
    asked = await read_object(request, gateway_of(request).settings.max_body)
    try:
        return KeyView.of(_found(await admin.change(_store(request), key_id, asked, actor_of(request)), key_id))
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
    asked = await fields_of(request, gateway_of(request).settings.max_body, ROTATE, optional=True)
    try:
        made = await admin.rotate(_store(request), key_id, asked.get("overlap", OVERLAP_S), actor_of(request))
    except KeyEnded as error:
        raise _ended(error) from None
    if made is None:
        raise _missing(key_id)
    return KeyWithSecret.of(made[0], key=made[1])


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
    return ChangeList(data=[ChangeView(**one) for one in await audit.latest(_store(request), limit)])


async def _turned(request: Request, key_id: str, verb: str) -> KeyView:
    try:
        return KeyView.of(_found(await admin.turn(_store(request), key_id, verb, actor_of(request)), key_id))
    except KeyEnded as error:
        raise _ended(error) from None


def _store(request: Request) -> Redis:
    return gateway_of(request).client.store


def _found(key: Key | None, key_id: str) -> Key:
    if key is None:
        raise _missing(key_id)
    return key


def _missing(key_id: str) -> Problem:
    return Problem(404, f"There is no key {shown(api_keys.without_secret(key_id))}.", code="key_not_found")


def _ended(error: KeyEnded) -> Problem:
    return Problem(409, str(error), code="key_ended", headers=ONCE)
