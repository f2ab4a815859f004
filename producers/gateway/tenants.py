"""The routes of `/v1/tenants`: the limits that all keys of a tenant share."""

from __future__ import annotations

from fastapi import APIRouter, Request

from producers.admin import tenants as admin
from producers.gateway.context import gateway_of
from producers.gateway.http.authorization import ADMINISTERS, actor_of
from producers.gateway.http.errors import Problem
from producers.gateway.http.request_body import documented, read_object
from producers.gateway.keys import KEPT_SCHEMAS, LIMIT_SCHEMAS, TenantLimits, nullable
from producers.gateway.tasks.views import errors
from producers.store.access import tenants
from producers.store.access.api_keys import Limits
from producers.store.access.tenants import MAX_LIMITED, TooManyTenants

router = APIRouter(prefix="/v1/tenants", tags=["keys"], dependencies=ADMINISTERS)

CHANGE = nullable({name: schema for name, schema in {**LIMIT_SCHEMAS, **KEPT_SCHEMAS}.items() if name in admin.LIMITED})


@router.get("/{tenant:path}/limits", response_model=TenantLimits, responses=errors(404))
async def look(request: Request, tenant: str) -> TenantLimits:
    """Get the limits of a tenant; null where there is none."""
    return _view(tenant, await tenants.get(gateway_of(request).client.store, tenant))


@router.post(
    "/{tenant:path}/limits",
    response_model=TenantLimits,
    responses=errors(404, 413, 415),
    openapi_extra=documented(CHANGE),
)
async def change(request: Request, tenant: str) -> TenantLimits:
    """Change limits of a tenant: on every gateway within a second. Null unsets one; what was counted stays counted."""
    gateway = gateway_of(request)
    fields = await read_object(request, gateway.settings.max_body)
    try:
        return _view(tenant, await admin.limit(gateway.client.store, tenant, fields, actor_of(request)))
    except TooManyTenants:
        message = f"{MAX_LIMITED} tenants have limits, the most; unset those of one first."
        raise Problem(400, message, code="too_many_tenants") from None


def _view(tenant: str, limits: Limits) -> TenantLimits:
    return TenantLimits.model_validate({"tenant": tenant, **{name: getattr(limits, name) for name in admin.LIMITED}})
