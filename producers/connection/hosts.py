"""Hosts and addresses as text: forms that programs read differently, and the network of a caller's address."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

#: A last label that makes a host a number to many programs (WHATWG URL, 3.5): `0177.0.0.1`, `0x7f.1`, `127.1`.
_NUMBER: Final = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9A-Fa-f]*)\.?")


def check_form(host: str) -> None:
    """Raise ValueError for a host that is an IPv4 address to some programs and another one, or a name, to others.

    `0177.0.0.1` is 127.0.0.1 where a leading zero makes a number octal, and 177.0.0.1 elsewhere. The message completes
    "the URL ...".
    """
    if ":" in host or _NUMBER.fullmatch(host):
        try:
            ip_address(host)
        except ValueError:
            raise ValueError(
                f"has the host {host}, a number that is no address, or another one to other programs; an IPv4 address "
                "has four decimal numbers from 0 to 255 without leading zeros, such as 192.0.2.10"
            ) from None


@lru_cache(4096)
def network_of(address: str) -> str:
    """The part of an address that its holder cannot change at will: the first 64 bits of IPv6, else all of it."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return address  # a proxy passes on any text of a caller
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is None:
            return f"{IPv6Address(int(parsed) >> 64 << 64)}/64"
        parsed = parsed.ipv4_mapped
    return str(parsed)
