"""The caller of a request, and whether it may make it: every endpoint names the scope that it needs.

    @router.get("", dependencies=READS)      then principal_of(request), tenant_of(request)

Endpoints without a scope are open to all; a test knows them by name.

`check_page` refuses requests of web pages that may not make them. A browser on this machine reaches what listens here,
so any page could call a gateway without keys: plainly, or under its own name that it lets point here (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Hashable, Iterable
from functools import lru_cache
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from starlette.requests import HTTPConnection
from starlette.types import Scope

from producers.connection.addresses import network_of
from producers.connection.turns import OWNER
from producers.contract.fields import MAX_TENANT
from producers.errors import shown
from producers.gateway.fair_share import charge_to
from producers.gateway.http.errors import Problem
from producers.gateway.http.sse import OPENED
from producers.gateway.settings import GatewaySettings
from producers.store.access.api_keys import LOCAL, Principal
from producers.store.access.audit import Actor
from producers.store.usage.limits import Charge

#: Domains in which nobody can register a name: RFC 6761, and ICANN's resolution of 2024 on private use.
RESERVED: Final = (".localhost", ".internal")
TENANT: Final = "Penstock-Tenant"
_TENANT: Final = TENANT.lower().encode()
#: The header for OpenAPI (`parameters` of an operation).
PARAMETER: Final[dict[str, Any]] = {
    "name": TENANT,
    "in": "header",
    "description": "the tenant that asks; with a key, nothing but the key's own",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TENANT},
}


def check_page(connection: HTTPConnection, settings: GatewaySettings) -> None:
    """Refuse web pages of other origins that `--cors-origin` does not name, wherever the browser itself would not: they
    know no key, but may need none, and a WebSocket is open to all. Raises Problem."""
    keyless = settings.auth == "none"
    if keyless or connection.scope["type"] == "websocket":
        _check_origin(connection, settings.cors_origins)
    if keyless and not settings.insecure:
        _check_host(connection)


def _check_origin(connection: HTTPConnection, allowed: Collection[str]) -> None:
    origin = connection.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    if origin.partition("://")[2] != connection.headers.get("host"):
        raise Problem(
            403,
            f"Pages of the origin {shown(origin)} may not ask here; start the gateway with --cors-origin for it.",
            code="origin_not_allowed",
        )


def _check_host(connection: HTTPConnection) -> None:
    host = connection.headers.get("host")
    if host and not is_private(host):
        raise Problem(
            403,
            f"Without keys, nobody may ask here under the name {shown(host)}, which a web page may have let point "
            "here: use localhost or an address, or start the gateway with --auth keys, or --auth none --insecure.",
            code="host_not_allowed",
        )


@lru_cache(256)
def is_private(host: str) -> bool:
    """Whether a `Host` is an address, or a name that nobody can have in the public DNS: those have a dot."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if ("." not in name and ":" not in name) or name.endswith(RESERVED):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Needs(SecurityBase):
    """A dependency: the caller has a key of this scope, where the gateway asks for keys, and names no other tenant
    than the key's; and is no page of another origin. Raises Problem.

    The OpenAPI document says so of each endpoint that has it, and of the key's header.
    """

    scheme_name = "key"
    model = HTTPBearer(description="an API key, `psk_...`, where the gateway asks for keys (`--auth keys`)")

    def __init__(self, scope: str | None, *, tasks: bool = False) -> None:
        """`scope`: None: any key will do. `tasks`: requests become tasks, which count in a minute's. Those of an
        account that is known to have none left are refused before their body is read."""
        self.scope = scope
        self.tasks = tasks

    async def __call__(self, connection: HTTPConnection) -> None:
        gateway = connection.app.state.gateway
        callers = gateway.callers
        check_page(connection, gateway.settings)
        state = connection.scope.setdefault("state", {})  # `connection.state` would make another one for each name
        if callers is None:
            state["principal"] = LOCAL
            if self.tasks and gateway.accounts.spent:
                await gateway.accounts.check_spent(connection, _named(connection.scope["headers"]))
            return
        token = token_of(connection.scope["headers"])
        principal = callers.again(token)
        if principal is None:
            principal = await callers.principal(token, _address(connection) or "nobody")
            if principal.tenant is not None:
                charge_to(("tenant", principal.tenant))
        if self.scope is not None and not principal.may(self.scope):
            has = ", ".join(sorted(principal.scopes)) or "none"
            raise Problem(403, f"This key lacks the scope {self.scope}; it has {has}.", code="missing_scope")
        same(principal, _named(connection.scope["headers"]), TENANT)
        state["principal"], state[OPENED] = principal, token
        OWNER.set(principal.tenant)
        if self.tasks and gateway.accounts.spent:
            await gateway.accounts.check_spent(connection, principal.tenant)


SUBMITS, READS, CANCELS, MEASURES, ADMINISTERS = (
    [Depends(Needs(scope))] for scope in ("submit", "read", "cancel", "metrics", "admin")
)

#: Of endpoints that any key opens.
ANYBODY: Final = [Depends(Needs(None))]
#: Of endpoints whose requests become tasks at once.
SUBMITS_TASKS: Final = [Depends(Needs("submit", tasks=True))]


def principal_of(connection: HTTPConnection) -> Principal:
    """Returns the caller, at an endpoint that needs a scope."""
    principal: Principal = connection.state.principal
    return principal


def actor_of(connection: HTTPConnection) -> Actor:
    """Returns the caller, for the audit log."""
    return Actor(principal_of(connection).key or "local", _address(connection))


def tenant_of(connection: HTTPConnection) -> str | None:
    """The caller's tenant: the key's; without keys the one that its header names, in UTF-8, if any. Raises Problem."""
    principal = principal_of(connection)
    return _named(connection.scope["headers"]) if principal.key is None else principal.tenant


def marks(connection: HTTPConnection) -> dict[str, str]:
    """Returns the fields of a record that name the key which made it."""
    principal = principal_of(connection)
    return {} if principal.key is None else {"key": principal.key}


def charge_of(connection: HTTPConnection) -> Charge | None:
    """Returns the charge of the request's tasks to accounts (`producers.gateway.admission.limits`), if there is one.
    The edge puts the remainder into headers of the answer."""
    return getattr(connection.state, "charge", None)


def same(principal: Principal, named: str | None, param: str) -> None:
    """Raise Problem if a key's holder names another tenant than its own."""
    if principal.key is not None and named is not None and named != principal.tenant:
        raise Problem(
            403, f"{param} is {shown(named)}, and this key another tenant's.", code="wrong_tenant", param=param
        )


def caller_of(scope: Scope) -> Hashable:
    """The caller of a request: the tenant of its key if that has let somebody in here, else its address (of IPv6: 64
    bits).

    That is no authentication. A key that is asked for again now and then is not counted with all who share its address.
    """
    gateway = getattr(scope["app"].state, "gateway", None)
    if gateway is not None and gateway.callers is not None:
        tenant = gateway.callers.tenant_before(token_of(scope["headers"]))
        if tenant is not None:
            return "tenant", tenant
    client = scope.get("client")
    return network_of(client[0]) if client else "nobody"


def _named(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    values = [value for name, value in headers if name == _TENANT]
    if not values:
        return None
    if len(values) > 1:  # a proxy that adds its own may mean either
        raise _refusal(b", ".join(values).decode("latin-1"), "given once")
    try:
        name = values[0].decode()
    except UnicodeDecodeError:
        raise _refusal(values[0].decode("latin-1"), "valid UTF-8") from None
    if not 1 <= len(name) <= MAX_TENANT:
        raise _refusal(name, f"a name of 1 to {MAX_TENANT} characters")
    return name


def _refusal(value: str, expected: str) -> Problem:
    return Problem(400, f"{TENANT} is {shown(value)}; {TENANT} must be {expected}", code="invalid_value", param=TENANT)


def _address(connection: HTTPConnection) -> str | None:
    client = connection.scope.get("client")  # a fifth of what it takes to make `connection.client`
    return client[0] if client else None


def token_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key in a request's headers: OpenAI's, or `x-api-key`. Several different ones are none: a proxy may have
    checked another one than we would take."""
    values: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            if value[:7].lower() == b"bearer ":
                values.append(value[7:].strip())
        elif name == b"x-api-key":
            values.append(value.strip())
    return b" ".join(set(values) if len(values) > 1 else values).decode("latin-1") if values else None
