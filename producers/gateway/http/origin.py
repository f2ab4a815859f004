"""Whether a request comes from a web page that may make it. A browser on this machine reaches what listens here, so a
page of anywhere could ask a gateway without keys: plainly, or under its own name that it lets point here (DNS
rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from producers.errors import shown
from producers.gateway.http.errors import Problem
from producers.gateway.settings import GatewaySettings

#: Domains in which nobody can register a name: RFC 6761, and ICANN's resolution of 2024 on private use.
RESERVED: Final = (".localhost", ".internal")


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
