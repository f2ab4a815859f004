from __future__ import annotations

import asyncio
from ipaddress import ip_address
from typing import Any, NoReturn

import aiodns
import pytest

from producers.connection.addresses import Resolver, Unresolved, networks, refusal
from producers.contract.webhook import Destination

PUBLIC = (
    "93.184.216.34",
    "192.31.196.1",
    "2606:4700:4700::1111",
    "::ffff:1.1.1.1",
    "64:ff9b::101:101",
    "2002:101:101::1",
)
#: Loopback, private, carrier's, link-local with the clouds' metadata, documentation, multicast, and what embeds them.
PRIVATE = (
    *("0.0.0.0", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.255", "169.254.169.254"),
    *("172.16.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "203.0.113.1", "224.0.0.1"),
    *("240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b:1::1"),
    *("100::1", "2001::1", "2001:db8::1", "2001:0:7f00:1::", "2002:7f00:1::", "3fff::1", "5f00::1", "fc00::1"),
    *("fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1", "ff0e::1", "2606:4700::1%eth0"),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_called_by_https_on_the_usual_ports(address: str) -> None:
    found = [ip_address(address)]
    assert refusal("https", 443, found) is None
    assert refusal("https", 80, found) is None
    assert "8443" in str(refusal("https", 8443, found))
    assert "https://" in str(refusal("http", 80, found))


@pytest.mark.parametrize("address", PRIVATE)
def test_any_other_address_is_refused_also_beside_a_public_one(address: str) -> None:
    for found in ([address], [PUBLIC[0], address]):
        said = refusal("https", 443, [ip_address(one) for one in found])
        assert str(ip_address(address)) in str(said)


def test_the_allow_list_opens_its_networks_for_any_scheme_and_port() -> None:
    allowed = networks(["127.0.0.0/8", "fd00::/8"])
    for address in ("127.0.0.1", "::ffff:127.0.0.1", "fd00::7"):
        assert refusal("http", 9000, [ip_address(address)], allowed) is None
    assert refusal("http", 80, [ip_address("127.0.0.1"), ip_address(PUBLIC[0])], allowed) is not None
    assert refusal("https", 443, [ip_address("127.0.0.1"), ip_address(PUBLIC[0])], allowed) is None
    assert refusal("http", 9000, [ip_address("127.0.0.1"), ip_address("10.0.0.1")], allowed) is not None
    assert refusal("https", 443, [], allowed) is not None


def test_names_are_resolved_as_this_machine_does_and_numbers_are_themselves() -> None:
    async def ask() -> None:
        resolver = Resolver()
        try:
            assert ip_address("127.0.0.1") in await resolver.resolve("localhost")
            assert await resolver.resolve("::1") == [ip_address("::1")]
            with pytest.raises(Unresolved, match=r"nowhere\.invalid"):
                await resolver.resolve("nowhere.invalid")
        finally:
            await resolver.aclose()

    asyncio.run(ask())


@pytest.mark.parametrize(
    "host",
    [
        *("0177.0.0.1", "010.8.8.8", "0x7f.0.0.1", "0x7f.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0"),
        *("127.0.0.1.", "127.0.0.256", "1.2.3.4.5", "127.0.0.0x", "a.1", "::ffff:0177.0.0.1", "::1::"),
    ],
)
def test_a_number_that_programs_read_differently_is_refused_by_its_form(host: str) -> None:
    """No name server is asked."""

    class Asked(aiodns.DNSResolver):
        async def getaddrinfo(self, *args: Any, **options: Any) -> NoReturn:  # type: ignore[override]
            raise AssertionError("it was asked for")

    async def ask() -> None:
        resolver = Resolver()
        resolver._dns = Asked()
        with pytest.raises(Unresolved, match="without leading zeros"):
            await resolver.resolve(host)

    asyncio.run(ask())
    with pytest.raises(ValueError, match=r"without leading zeros|cannot be read"):
        Destination.parse(f"https://[{host}]/" if ":" in host else f"https://{host}/")


@pytest.mark.parametrize(
    "host", ["192.0.2.10", "::ffff:10.0.0.1", "fd00::7", "1a.example", "x.0y", "0x.example.", "a-1"]
)
def test_other_hosts_are_what_they_look_like(host: str) -> None:
    assert Destination.parse(f"https://[{host}]/" if ":" in host else f"https://{host}/").host == host
