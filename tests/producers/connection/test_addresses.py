from __future__ import annotations

import asyncio
from ipaddress import ip_address

import pytest

from producers.connection.addresses import Resolver, Unresolved, networks, refusal

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
            for host in ("nowhere.invalid", "0x7f.1", "2130706433"):  # the last two are 127.0.0.1 to some
                with pytest.raises(Unresolved, match=host):
                    await resolver.resolve(host)
        finally:
            await resolver.aclose()

    asyncio.run(ask())
