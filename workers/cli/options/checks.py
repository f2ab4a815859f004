"""Checks of options' values, as typer's callbacks and after parsing. They raise typer.BadParameter."""

from __future__ import annotations

import math
import re
from typing import Final

import typer

#: The longest time that clocks and servers can still reckon with: 30 years, in seconds.
LONGEST: Final = 1e9


def finite(time: float | None) -> float | None:
    """Checks an option's length of time (s), or None. Raises typer.BadParameter."""
    if time is None:
        return None
    if not math.isfinite(time):
        raise typer.BadParameter(f"{time} is not a length of time")
    if time > LONGEST:
        raise typer.BadParameter(f"{time:g} is too long a time: {LONGEST:g} is the most")
    return time


def process_name(name: str | None) -> str | None:
    """Checks an option's process name, or None. Raises typer.BadParameter."""
    if name is not None and not re.fullmatch(r"[!-~]{1,512}", name):
        raise typer.BadParameter(
            f"{name!r} must be 1 to 512 ASCII letters, digits or punctuation marks, without spaces"
        )
    return name


def origins(origins: list[str] | None) -> list[str] | None:
    """Checks origins. Raises typer.BadParameter for one that no browser would send."""
    for origin in origins or ():
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise typer.BadParameter(f"{origin!r} is not an origin; it must be SCHEME://HOST, SCHEME://HOST:PORT or *")
    return origins


def proxies(proxies: list[str] | None) -> list[str] | None:
    """Checks addresses of proxies. Raises typer.BadParameter for a name: only addresses can be compared."""
    import ipaddress

    for proxy in proxies or ():
        try:
            ipaddress.ip_network("0.0.0.0/0" if proxy == "*" else proxy)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give an address, a network (10.0.0.0/8), or *") from None
    return proxies


def place(place: str | None) -> str | None:
    """Checks a place for files. Raises typer.BadParameter for a bad URL."""
    from producers.store.blobs.place import checked_place

    try:
        return None if place is None else checked_place(place)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def places(places: list[str]) -> list[str]:
    """Checks places for files. Raises as `place` does."""
    return [one for one in map(place, places) if one is not None]


def networks(networks: list[str] | None) -> list[str] | None:
    """Checks an allow-list. Raises typer.BadParameter for what is no network."""
    import ipaddress

    for network in networks or ():
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise typer.BadParameter(f"{error}; give a network (10.0.0.0/8) or an address") from None
    return networks


def provider(notice: str | None) -> str | None:
    if notice not in (None, "aws"):
        raise typer.BadParameter(f"{notice!r} is unknown; the only provider is aws")
    return notice


def check_spot(provider: str | None, url: str | None) -> None:
    """Checks the metadata service's URL. Raises typer.BadParameter without a provider, or for another kind of text."""
    if url is not None and (provider is None or not url.startswith(("http://", "https://"))):
        raise typer.BadParameter(
            "must be a URL (http://...), and needs --spot-provider", param_hint="--spot-metadata-url"
        )


def health_ports(first: int | None, workers: int) -> list[int | None]:
    """A port for each worker, counted up from the first one's; 0 means any free port, for all.

    Raises typer.BadParameter where the last port would be above 65535.
    """
    if first is None or first == 0:
        return [first] * workers
    if first + workers - 1 > 65535:
        raise typer.BadParameter(
            f"{workers} workers need the ports {first} to {first + workers - 1}, and 65535 is the last",
            param_hint="--health-port",
        )
    return list(range(first, first + workers))
