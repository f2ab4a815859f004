"""How many connections an address may have, and which make room."""

from __future__ import annotations

import pytest

from producers.gateway.http import peers as bounds
from producers.gateway.http.peers import Peers


class Idle:
    """A connection that says when it is closed."""

    def __init__(self, peers: Peers, host: str | None) -> None:
        self.closed = False
        self.problem = peers.enter(self, host)

    def close_idle(self) -> None:
        self.closed = True

    def cut(self) -> None:
        self.closed = True

    @property
    def code(self) -> str | None:
        return None if self.problem is None else self.problem.code


def made(most: int = 100, per_address: int = 2, *proxies: str) -> Peers:
    return Peers(most, per_address, proxies, lambda: None)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("203.0.113.1", "203.0.113.1", True),
        ("203.0.113.1", "203.0.113.2", False),
        ("203.0.113.1", "::ffff:203.0.113.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
    ],
)
def test_an_address_has_a_share_and_of_ipv6_64_bits_are_one(first: str, second: str, same: bool) -> None:
    peers = made()
    busy = [Idle(peers, first) for _ in range(2)]
    for connection in busy:
        peers.busy(connection)
    other = Idle(peers, second)
    assert other.code == ("too_many_connections_of_address" if same else None)
    assert len(peers) == (2 if same else 3)
    peers.leave(busy[0])
    assert Idle(peers, first).code is None


def test_an_address_that_has_its_share_closes_its_own_idle_connections_the_oldest_first() -> None:
    peers = made()
    other, first, second = Idle(peers, "203.0.113.2"), Idle(peers, "203.0.113.1"), Idle(peers, "203.0.113.1")
    peers.busy(first)
    peers.idle(first)  # now the second has been idle for longer
    third = Idle(peers, "203.0.113.1")
    assert [one.closed for one in (other, first, second, third)] == [False, False, True, False]
    peers.leave(second)  # as its socket is closed, later
    assert len(peers) == 3
    assert Idle(peers, "203.0.113.1").code is None
    assert first.closed


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3", "192.0.2.7", None])
def test_loopback_proxies_and_unix_sockets_stand_for_many_callers(host: str | None) -> None:
    peers = made(100, 2, "10.0.0.0/8", "192.0.2.7", "name")
    assert {Idle(peers, host).code for _ in range(50)} == {None}


def test_any_address_may_be_a_proxys_and_0_is_no_bound() -> None:
    for peers in (made(100, 2, "*"), made(100, 0)):
        assert {Idle(peers, "203.0.113.1").code for _ in range(50)} == {None}


def test_one_address_shuts_nobody_out_with_idle_connections() -> None:
    """180 of them were enough for a gateway that may have 300 files open."""
    peers = made(172, 43)
    flood = [Idle(peers, "203.0.113.1") for _ in range(180)]
    assert {connection.code for connection in flood} == {None}
    assert len(peers) == 43
    for connection in flood[-43:]:
        peers.busy(connection)
    assert Idle(peers, "203.0.113.1").code == "too_many_connections_of_address"
    assert Idle(peers, "203.0.113.2").code is None


def test_idle_connections_of_many_addresses_make_room_and_busy_ones_fill_the_gateway() -> None:
    peers = made(80, 20)
    connections = [Idle(peers, f"198.51.100.{number}") for number in range(200)]
    assert {connection.code for connection in connections} == {None}
    assert [connection.closed for connection in connections] == [True] * 130 + [False] * 70
    for connection in connections[-70:]:
        peers.busy(connection)
    busy = []
    for number in range(11):
        busy.append(Idle(peers, f"198.51.100.{number}"))
        peers.busy(busy[-1])
    assert [connection.code for connection in busy] == [None] * 10 + ["too_many_connections"]
    peers.leave(busy[0])
    assert Idle(peers, "203.0.113.1").code is None


def test_of_answers_that_nobody_takes_who_has_most_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "UNSENT", 100)
    peers = made(100, 0)
    one, *flood = (Idle(peers, "203.0.113.1") for _ in range(6))
    peers.unsent(one, "slow", 40)
    for connection in flood:
        peers.unsent(connection, "hostile", 20)
    assert [connection.closed for connection in (one, *flood)] == [False, True, True, False, False, False]
    peers.unsent(one, "slow", 41)  # its next answer
    assert flood[2].closed
    peers.sent(one)
    peers.leave(flood[3])
    last = Idle(peers, "203.0.113.2")
    peers.unsent(last, "other", 80)
    assert not any(connection.closed for connection in (one, flood[4], last))
    for connection in (flood[4], last):
        peers.sent(connection)
    assert not peers._unsent_bytes
    assert not any((peers._unsent, peers._unsent_by, peers._unsent_of))
