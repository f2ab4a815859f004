"""The header that names a request's tenant, since no parameter of OpenAI's means one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from producers.contract.task import MAX_TENANT
from producers.errors import shown
from producers.gateway.http.errors import Problem

TENANT: Final = "Penstock-Tenant"
#: The header for OpenAPI (`parameters` of an operation).
PARAMETER: Final[dict[str, Any]] = {
    "name": TENANT,
    "in": "header",
    "description": "the tenant that asks",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TENANT},
}


def tenant_of(headers: Mapping[str, str]) -> str | None:
    """The tenant's name, in UTF-8; None without the header. Raises Problem."""
    value = headers.get(TENANT)
    if value is None:
        return None
    try:
        name = value.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise _refusal(value, "valid UTF-8") from None
    if not 1 <= len(name) <= MAX_TENANT:
        raise _refusal(name, f"a name of 1 to {MAX_TENANT} characters")
    return name


def _refusal(value: str, wanted: str) -> Problem:
    return Problem(400, f"{TENANT} is {shown(value)}; {TENANT} must be {wanted}", code="invalid_value", param=TENANT)
