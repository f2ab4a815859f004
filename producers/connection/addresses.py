"""Decides which addresses a caller's URL may make us connect to (server-side request forgery).

    host -> Resolver: all its addresses -> refusal: None, or why not -> connect to one of these addresses, by number

A name may give other addresses a moment later, so whoever connects must connect to the address that was checked.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

import aiodns

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


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

#: Ports that may be called outside the allow-list.
PORTS: Final = (443, 80)
#: Longest time (s) that a name's resolution may take.
RESOLVE_S: Final = 5.0
#: NAT64 (RFC 6052): the last 32 bits are an IPv4 address.
_NAT64: Final = IPv6Network("64:ff9b::/96")
#: Networks that Python's `is_global` takes for public, in some versions: Azure's agent for virtual machines; protocol
#: assignments (RFC 6890), where a cloud has its metadata; former 6to4 relays; NAT64 of a local network (RFC 8215),
#: whose form only that network knows; documentation (RFC 9637).
_NOT_PUBLIC: Final = tuple(
    map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "3fff::/20"))
)


class Unresolved(Exception):
    """The name has no address, or none in time. The message says why."""


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """An allow-list: networks as CIDR, or single addresses. Raises ValueError."""
    return tuple(ip_network(text) for text in texts)


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one contains (mapped, NAT64, 6to4); any other address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Whether the address is on the allow-list."""
    plain = embedded(address)
    return any(plain in network or address in network for network in allowed)


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet, of a single machine."""
    plain = embedded(address)
    odd = plain.is_multicast or plain.is_reserved or plain.is_unspecified
    if isinstance(plain, IPv6Address):
        odd = odd or plain.is_site_local or plain.scope_id is not None
    return plain.is_global and not odd and not any(plain in network for network in _NOT_PUBLIC)


def refusal(scheme: str, port: int, addresses: Sequence[Address], allowed: Sequence[Network] = ()) -> str | None:
    """The reason why a URL with these addresses must not be called; None if it may be.

    Every address must be public or on the allow-list. http:// and other ports than 443 and 80 need all on the list.
    """
    if not addresses:
        return "its host has no address"
    listed = [is_allowed(address, allowed) for address in addresses]
    for address, on_list in zip(addresses, listed, strict=True):
        if not on_list and not is_public(address):
            return f"its host has the address {address}, which is not public; --webhook-allow {address} would allow it"
    if all(listed):
        return None
    if scheme != "https":
        return "it is not https://; http:// is for addresses that --webhook-allow names"
    if port not in PORTS:
        return f"it has the port {port}; 443 and 80 are called, others only where --webhook-allow names the address"
    return None


class Resolver:
    """Resolves names on one event loop, as the machine's settings say (hosts file, search domains, name servers).

    It holds no thread, so names whose servers never answer delay no other name.
    """

    def __init__(self) -> None:
        self._dns: aiodns.DNSResolver | None = None

    async def resolve(self, host: str) -> list[Address]:
        """All addresses of the host, IPv4 first. Raises Unresolved."""
        try:
            return [ip_address(host)]
        except ValueError:
            pass
        try:
            check_form(host)
        except ValueError as error:
            raise Unresolved(f"the URL {error}") from None
        self._dns = self._dns or aiodns.DNSResolver(timeout=RESOLVE_S / 2, tries=2)
        try:
            async with asyncio.timeout(RESOLVE_S):
                result = await self._dns.getaddrinfo(host, family=socket.AF_UNSPEC, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise Unresolved(f"no name server answered for {host} within {RESOLVE_S:g} s") from None
        except aiodns.error.DNSError as error:
            raise Unresolved(f"{host} cannot be resolved: {error.args[-1]}") from None
        addresses = {ip_address(node.addr[0].decode()) for node in result.nodes}
        return sorted(addresses, key=lambda address: (address.version, int(address)))

    async def aclose(self) -> None:
        """Close it; lookups that are under way end with Unresolved."""
        if self._dns is not None:
            await self._dns.close()
