"""`/v1/webhook_endpoints`, as OpenAI's clients call it: places that hear of what becomes of tasks and batches.

    fields (URL, event types) -> Destinations: may it be called? -> producers.store.endpoints
    /test puts a row into the outbox and waits until a webhooks process has tried it

Deliveries are made by `workers.webhooks`. Times are unix seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Annotated, Any, Final, Literal, Self

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from producers.contract.webhook import EVENT_TYPES, MAX_URL, Destination, checked_events, checked_url
from producers.errors import shown
from producers.gateway.context import gateway_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import CANCELS, READS, SUBMITS, actor_of, principal_of, same
from producers.gateway.http.errors import ONCE, Problem
from producers.gateway.http.request_body import SETTINGS, documented, fields_of
from producers.gateway.tasks.ownership import audit_operator
from producers.gateway.tasks.views import Named, Page, errors
from producers.store import endpoints
from producers.store.endpoints import MAX_ENDPOINTS, Endpoint, Secrets, TooManyEndpoints

MAX_NAME = 256
URL: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_URL, "description": "an https:// URL"}
TYPES: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "string", "enum": list(EVENT_TYPES)}}
CHANGEABLE: dict[str, dict[str, Any]] = {
    "url": URL,
    "event_types": TYPES,
    "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "unset: the URL's host"},
    "celery": {"type": "boolean", "description": "whether it hears of plain Celery tasks, too; unset: false"},
    "enabled": {"type": "boolean", "description": "false: its events are given up; unset: true"},
}
CREATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["url", "event_types"],
    "properties": {
        **CHANGEABLE,
        "tenant": {"type": "string", "minLength": 1, "maxLength": 200, "description": "unset: all tenants' tasks"},
    },
}
UPDATE: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": CHANGEABLE}
ROTATE: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "keep_old_secret_active_for_24_hours": {
            "type": "boolean",
            "description": "whether deliveries are signed with both secrets for 24 hours; unset: true",
        }
    },
}
TEST: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["event_type"],
    "properties": {"event_type": {"type": "string", "enum": list(EVENT_TYPES)}},
}
router = APIRouter(prefix="/v1", tags=["webhooks"])
#: Endpoints on a page, unless asked for otherwise, and the most.
PAGE, MAX_PAGE = 20, 100
#: Time (s) for which a test waits for its delivery, which itself ends after 20 s.
TEST_S: Final = 25.0
#: Fields whose check says more than their schema.
CHECKS: Final[Mapping[str, Callable[[Any, str], Any]]] = {"url": checked_url, "event_types": checked_events}


class EndpointView(Named):
    """A webhook endpoint. Its secret is shown once, when it is made or rotated; `signing_secret_hint` is its end."""

    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    url: str
    name: str
    event_types: list[str]
    tenant: str | None
    celery: bool
    enabled: bool
    disabled_because: str | None
    created_at: int
    updated_at: int
    signing_secret_hint: str

    @classmethod
    def of(cls, endpoint: Endpoint, **more: Any) -> Self:
        shown = {name: value for name, value in asdict(endpoint).items() if name != "secrets"}
        return cls(**shown, signing_secret_hint=endpoint.secrets.hint(), **more)


class EndpointWithSecret(EndpointView):
    signing_secret: str


class EndpointList(Page[EndpointView]):
    pass


class EndpointDeleted(BaseModel):
    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: Literal[True] = True


class EndpointTested(BaseModel):
    """The endpoint's answer to a test event. `success` is true for every answer, whatever its status."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    webhook_endpoint_id: str
    event_type: str
    status_code: int = Field(description="the HTTP status that the endpoint answered with")
    success: Literal[True] = True


class EventTypes(BaseModel):
    object: Literal["list"] = "list"
    data: list[str]


@router.get("/webhook_event_types", dependencies=READS, response_model=EventTypes)
async def event_types() -> EventTypes:
    """List the types of events that an endpoint may hear of."""
    return EventTypes(data=list(EVENT_TYPES))


@router.post(
    "/webhook_endpoints",
    dependencies=SUBMITS,
    response_model=EndpointWithSecret,
    responses=errors(404, 413, 415, 422),
    openapi_extra=documented(CREATE) | {"parameters": [idempotency.PARAMETER]},
)
async def create(request: Request, response: Response) -> EndpointWithSecret:
    """Make an endpoint. The answer alone shows its secret, with which it verifies what it receives."""
    gateway, now = gateway_of(request), int(time.time())
    fields = await _fields(request, CREATE)
    principal = principal_of(request)
    if not principal.sees_all:
        same(principal, fields.get("tenant"), "tenant")
        fields["tenant"] = principal.tenant
    await gateway.destinations.check(fields["url"], "url")
    endpoint_id, name = endpoints.new_id(), fields.pop("name", None) or Destination.parse(fields["url"]).host
    entry = await idempotency.first(request, gateway.client, endpoint_id, tenant=fields.get("tenant"))
    if entry is not None:
        endpoint_id = entry.id
        if entry.state == "made":  # its answer may have been lost, and the secret with it
            endpoint = _existing(await endpoints.get(gateway.client.store, endpoint_id), endpoint_id)
            response.headers.update(idempotency.REPLAYED)
            return EndpointWithSecret.of(endpoint, signing_secret=endpoint.secrets.plain())
    endpoint = Endpoint(id=endpoint_id, name=name, secrets=Secrets.new(), created_at=now, updated_at=now, **fields)
    max_endpoints = (await gateway.accounts.kept(endpoint.tenant)).max_endpoints
    audit = actor_of(request).did("endpoint.create", endpoint.id, endpoint.tenant)
    try:
        endpoint = await endpoints.create(gateway.client.store, endpoint, audit, max_endpoints)
    except TooManyEndpoints as error:
        whose = (
            f"There are {MAX_ENDPOINTS} endpoints of all tenants"
            if error.all
            else _many(endpoint.tenant, max_endpoints)
        )
        raise Problem(400, f"{whose}, the most; delete one first.", code="too_many_endpoints") from None
    if entry is not None:
        await idempotency.mark_made(gateway.client, entry)
    return EndpointWithSecret.of(endpoint, signing_secret=endpoint.secrets.plain())


def _many(tenant: str | None, limit: int | None) -> str:
    whose = "There are" if tenant is None else f"The tenant {shown(tenant)} has"
    return f"{whose} {limit} endpoints{' without a tenant' if tenant is None else ''}"


@router.get("/webhook_endpoints", dependencies=READS, response_model=EndpointList)
async def listed(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="most endpoints to answer with")] = PAGE,
    after: Annotated[str, Query(description="the last endpoint of the page before")] = "",
) -> EndpointList:
    """List the endpoints, the newest first."""
    store, principal = gateway_of(request).client.store, principal_of(request)
    rows = await (endpoints.every(store) if principal.sees_all else endpoints.of_tenant(store, principal.tenant))
    rows = [row for row in rows if principal.sees(row.tenant) and (not after or row.id < after)]
    return EndpointList.of([*map(EndpointView.of, rows)], limit)


@router.get("/webhook_endpoints/{endpoint_id}", dependencies=READS, response_model=EndpointView, responses=errors(404))
async def look(request: Request, endpoint_id: str) -> EndpointView:
    """Get an endpoint, without its secret."""
    return EndpointView.of(await _endpoint_of_caller(request, endpoint_id))


@router.post(
    "/webhook_endpoints/{endpoint_id}",
    dependencies=SUBMITS,
    response_model=EndpointView,
    responses=errors(404, 413, 415),
    openapi_extra=documented(UPDATE),
)
async def update(request: Request, endpoint_id: str) -> EndpointView:
    """Change an endpoint's fields that are given. Another URL, or `enabled`, enables one that was disabled."""
    gateway = gateway_of(request)
    existing = await _endpoint_of_caller(request, endpoint_id)
    fields = await _fields(request, UPDATE)
    if "url" in fields:
        await gateway.destinations.check(fields["url"], "url")
    enabled = fields.get("enabled", True if "url" in fields else None)

    def changed(endpoint: Endpoint) -> Endpoint:
        new = replace(endpoint, **fields)
        if enabled is not None:
            new = replace(new, enabled=enabled, disabled_because=None if enabled else "disabled by an update")
        return new if new == endpoint else replace(new, updated_at=int(time.time()))

    audit = actor_of(request).did("endpoint.update", endpoint_id, existing.tenant)
    new = await endpoints.change(gateway.client.store, endpoint_id, changed, audit)
    return EndpointView.of(_existing(new, endpoint_id))


@router.delete(
    "/webhook_endpoints/{endpoint_id}", dependencies=CANCELS, response_model=EndpointDeleted, responses=errors(404)
)
async def delete(request: Request, endpoint_id: str) -> EndpointDeleted:
    """Delete an endpoint. Its deliveries that wait are given up."""
    audit = actor_of(request).did(
        "endpoint.delete", endpoint_id, (await _endpoint_of_caller(request, endpoint_id)).tenant
    )
    if not await endpoints.remove(gateway_of(request).client.store, endpoint_id, audit):
        raise _missing(endpoint_id)
    return EndpointDeleted(id=endpoint_id)


@router.post(
    "/webhook_endpoints/{endpoint_id}/rotate_secret",
    dependencies=SUBMITS,
    response_model=EndpointWithSecret,
    responses=errors(404, 413, 415),
    openapi_extra=documented(ROTATE, required=False),
)
async def rotate_secret(request: Request, endpoint_id: str) -> EndpointWithSecret:
    """Give an endpoint a new secret, shown this once. The old one goes on for 24 hours, unless told not to."""
    audit = actor_of(request).did(
        "endpoint.rotate_secret", endpoint_id, (await _endpoint_of_caller(request, endpoint_id)).tenant
    )
    fields = await _fields(request, ROTATE, optional=True)
    keep = fields.get("keep_old_secret_active_for_24_hours") is not False
    now = int(time.time())

    def rotated(endpoint: Endpoint) -> Endpoint:
        return replace(endpoint, secrets=endpoint.secrets.rotated(now, keep_old=keep), updated_at=now)

    rotated_endpoint = _existing(
        await endpoints.change(gateway_of(request).client.store, endpoint_id, rotated, audit), endpoint_id
    )
    return EndpointWithSecret.of(rotated_endpoint, signing_secret=rotated_endpoint.secrets.plain())


@router.post(
    "/webhook_endpoints/{endpoint_id}/test",
    dependencies=SUBMITS,
    response_model=EndpointTested,
    responses=errors(404, 413, 415, 424),
    openapi_extra=documented(TEST),
)
async def test(request: Request, endpoint_id: str) -> EndpointTested:
    """Deliver a made-up event to an endpoint, as any other event is delivered but once, and wait for the answer."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "answer")
    event_type = (await _fields(request, TEST))["event_type"]
    endpoint, principal = await _endpoint_of_caller(request, endpoint_id), principal_of(request)
    if principal.key is not None and endpoint.tenant != principal.tenant:
        await audit_operator(request, "endpoint.test", endpoint_id, endpoint.tenant)
    row = await endpoints.tested(gateway.client.store, endpoint, event_type, TEST_S)
    if row is None:
        message = f"Nobody delivered the test event within {TEST_S:g} s: start `penstock webhooks run`."
        raise Problem(503, message, code="webhooks_stopped", headers=ONCE)
    tried = row.attempts[-1]
    if tried.status is None:
        raise Problem(
            424, f"There was no answer from {endpoint.url}: {tried.error}", code="webhook_failed", param="url"
        )
    return EndpointTested(webhook_endpoint_id=endpoint_id, event_type=event_type, status_code=tried.status)


async def _endpoint_of_caller(request: Request, endpoint_id: str) -> Endpoint:
    """An endpoint of the caller's tenant. Raises Problem."""
    principal = principal_of(request)
    whose = None if principal.sees_all else principal.tenant
    endpoint = await endpoints.get(gateway_of(request).client.store, endpoint_id, whose)
    return _existing(endpoint if endpoint is not None and principal.sees(endpoint.tenant) else None, endpoint_id)


def _existing(endpoint: Endpoint | None, endpoint_id: str) -> Endpoint:
    if endpoint is None:
        raise _missing(endpoint_id)
    return endpoint


def _missing(endpoint_id: str) -> Problem:
    return Problem(404, f"There is no webhook endpoint {shown(endpoint_id)}.", code="endpoint_not_found")


async def _fields(request: Request, schema: Mapping[str, Any], *, optional: bool = False) -> dict[str, Any]:
    limit = min(gateway_of(request).settings.max_body, SETTINGS)
    return await fields_of(request, limit, schema, CHECKS, optional=optional)
