"""Options that say whether a gateway asks for API keys, and what holds where they say nothing.

--auth      on loopback      on any other address
unset       none             keys
keys        keys             keys
none        none             refused, unless --insecure is given, too
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Annotated, Literal

import typer

from workers.cli.exits import Failure

Auth = Literal["keys", "none"]


def _kind(auth: str | None) -> str | None:
    if auth not in (None, "keys", "none"):
        raise typer.BadParameter(f"{auth!r} is unknown; it must be keys or none")
    return auth


AskFor = Annotated[
    str | None,
    typer.Option(
        "--auth",
        callback=_kind,
        help="keys: requests need an API key (penstock keys). none: callers name their tenant themselves. Unset: none "
        "on loopback, else keys.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="With --auth none: take requests without keys from other machines, too, and under any name."
    ),
]


def is_loopback(host: str) -> bool:
    """Whether a gateway that listens there is reached from this machine alone. False where that cannot be told."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None)  # noqa: S104 - compared: an empty name binds all addresses
        return all(ipaddress.ip_address(str(address[0])).is_loopback for *_, address in found)
    except (OSError, ValueError):
        return False


def decided(auth: str | None, insecure: bool, host: str) -> Auth:
    """Whether a gateway that listens on this address asks for keys. Raises Failure, as the module's head says."""
    if insecure and auth != "none":
        raise Failure("--insecure is for --auth none alone: with keys, other machines may ask anyway")
    here = is_loopback(host)
    if auth == "none" and not here and not insecure:
        raise Failure(
            f"--auth none on {host or 'all addresses'} would let anybody who reaches it in, as any tenant: leave it "
            "out and make keys with `penstock keys create`, or add --insecure"
        )
    if auth is None:
        return "none" if here else "keys"
    return "none" if auth == "none" else "keys"


def said(auth: Auth, host: str, where: str = "") -> str:
    """The words for it. `where`: the options that name the store."""
    if auth == "keys":
        return f"keys: penstock keys create --tenant NAME{where} makes one"
    if is_loopback(host):
        return (
            "none: this machine alone reaches it, and callers name their tenant themselves; --auth keys asks for keys"
        )
    return "none, though other machines reach it: callers name their tenant themselves (--insecure)"
