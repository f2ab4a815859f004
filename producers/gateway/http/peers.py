"""The open connections of a gateway: how many one address may have, and which of them make room for newcomers.

    made ─▶ enter ─▶ idle ─▶ busy, from a request's head to its answer ─▶ idle ─▶ ... ─▶ lost: leave

An idle connection costs its holder nothing, and keeps others out once there are too many. So while the gateway is
almost full, each newcomer closes the connection that has been idle for longest; and so does a newcomer of an address
that has its share. Only if all are busy is it refused.

An answer that was made in one piece stays in memory until its reader takes it. Of many that nobody takes, those of who
has most are cut off.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from functools import lru_cache
from ipaddress import ip_address, ip_network
from typing import Final, Protocol

from producers.connection.addresses import Network, network_of
from producers.gateway.http.errors import RETRY_AFTER, Problem, unavailable

#: The part of all connections that is kept free by closing idle ones: closing takes a moment, in which more may come.
SPARE: Final = 8
#: The part of all connections that one address may have, unless the settings say otherwise.
SHARE: Final = 4
#: Most bytes of complete answers that their readers have yet to take, in all.
UNSENT: Final = 128 << 20
#: Addresses whose names are kept at hand: a name takes as long to find as all the rest.
CACHED_NAMES: Final = 1024


class Peer(Protocol):
    """A connection."""

    def close_idle(self) -> None:
        """Close it; no request of it is under way."""

    def cut(self) -> None:
        """Close it now, and discard what was not sent."""


class _Address:
    """The connections of one address. `shared`: it stands for many callers, so any number is let in."""

    __slots__ = ("idle", "open", "shared")

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.open = 0
        self.idle: OrderedDict[Peer, None] = OrderedDict()


class Peers:
    """The open connections of one gateway.

    `max_open`: most of all. `per_address`: most of one address, of IPv6 of 64 bits; 0: any number. `proxies`:
    addresses and networks, or `*`, that carry many callers each, as loopback does. `closed`: called for each connection
    that had to make room.
    """

    def __init__(self, max_open: int, per_address: int, proxies: Collection[str], closed: Callable[[], None]) -> None:
        self.max_open = max_open
        self._closed = closed
        self._per_address = per_address
        self._all_shared = "*" in proxies
        self._proxies = _networks(proxies)
        self._name = lru_cache(CACHED_NAMES)(self._named)
        self._addresses: dict[str, _Address] = {}
        self._of: dict[Peer, tuple[str, _Address]] = {}
        self._idle: OrderedDict[Peer, None] = OrderedDict()
        """All that are idle, by when they became so."""
        self._unsent: dict[Hashable, OrderedDict[Peer, int]] = {}
        """Caller -> its connections with a complete answer that is not sent, and the bytes of it, oldest first."""
        self._unsent_by: Counter[Hashable] = Counter()
        self._unsent_of: dict[Peer, Hashable] = {}
        self._unsent_bytes = 0

    def __len__(self) -> int:
        return len(self._of)

    def enter(self, peer: Peer, host: str | None) -> Problem | None:
        """Let a new connection in, idle; or return the reason why not. `host`: its address; None: it has none."""
        name, shared = self._name(host)
        address = self._addresses.get(name) or _Address(shared)
        if not address.shared and 0 < self._per_address <= address.open and not self._close_oldest(address.idle):
            return Problem(
                429,
                f"Your address has {self._per_address} connections open, and requests on all of them; try again in a "
                "moment, or send several requests on one connection, one after the other.",
                code="too_many_connections_of_address",
                headers=RETRY_AFTER,
            )
        if (
            len(self._of) >= self.max_open - self.max_open // SPARE
            and not self._close_oldest(self._idle)
            and len(self._of) >= self.max_open
        ):
            message = (
                f"This gateway has {self.max_open} connections open, which is all that it takes; try again in a moment."
            )
            return unavailable(message, code="too_many_connections")
        self._addresses[name] = address
        address.open += 1
        self._of[peer] = name, address
        self._idle[peer] = address.idle[peer] = None
        return None

    def busy(self, peer: Peer) -> None:
        """A request's head has come."""
        if peer in self._idle:
            del self._idle[peer]
            del self._of[peer][1].idle[peer]

    def idle(self, peer: Peer) -> None:
        """All its requests are answered."""
        if peer in self._of:
            self._idle[peer] = self._of[peer][1].idle[peer] = None

    def unsent(self, peer: Peer, caller: Hashable, size: int) -> None:
        """An answer is complete, of which its reader has yet to take so many bytes. Beyond UNSENT in all, who has most
        of them loses the oldest."""
        self.sent(peer)
        self._unsent.setdefault(caller, OrderedDict())[peer] = size
        self._unsent_by[caller] += size
        self._unsent_of[peer] = caller
        self._unsent_bytes += size
        while self._unsent_bytes > UNSENT:
            heaviest = max(self._unsent_by, key=self._unsent_by.__getitem__)
            oldest = next(iter(self._unsent[heaviest]))
            self.sent(oldest)
            oldest.cut()

    def sent(self, peer: Peer) -> None:
        """Its reader has taken what was complete, or it is closed."""
        caller = self._unsent_of.pop(peer, None)
        if caller is None:
            return
        connections = self._unsent[caller]
        size = connections.pop(peer)
        self._unsent_bytes -= size
        self._unsent_by[caller] -= size
        if not connections:
            del self._unsent[caller], self._unsent_by[caller]

    def leave(self, peer: Peer) -> None:
        """It is closed, or makes room."""
        self.sent(peer)
        if peer not in self._of:  # it was not let in, or has made room
            return
        self.busy(peer)
        name, address = self._of.pop(peer)
        address.open -= 1
        if not address.open:
            del self._addresses[name]

    def _close_oldest(self, idle: OrderedDict[Peer, None]) -> bool:
        """Close the connection that has been idle for longest, if any is."""
        if not idle:
            return False
        peer = next(iter(idle))
        self.leave(peer)
        peer.close_idle()
        self._closed()
        return True

    def _named(self, host: str | None) -> tuple[str, bool]:
        """The name under which an address is counted, and whether it stands for many callers."""
        try:
            address = ip_address(host or "")
        except ValueError:  # a Unix socket, behind which a proxy is
            return "", True
        shared = address.is_loopback or self._all_shared or any(address in network for network in self._proxies)
        return (str(address) if shared else network_of(str(address))), shared


def _networks(texts: Collection[str]) -> list[Network]:
    """Returns the addresses and networks among the texts of `--proxy-headers`."""
    networks = []
    for text in texts:
        with suppress(ValueError):
            networks.append(ip_network(text, strict=False))
    return networks
