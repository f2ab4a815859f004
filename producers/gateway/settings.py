"""What a gateway is told."""

from __future__ import annotations

from dataclasses import dataclass

from producers.sweeper.reader_leases import LEASE_S


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of `penstock gateway`. Times are seconds, sizes bytes."""

    broker: str
    store: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_body: int = 4 << 20
    """A larger request body is refused with 413."""
    patience: float = 4.0
    """How long a failing connection to store or broker is tried again before the caller is told 503."""
    heartbeat: float = 10.0
    """A stream with no news for this long is sent a comment, so that proxies and clients see that it lives."""
    stall: float = 60.0
    """A reader that takes nothing for this long is dropped; it may come back to its position."""
    receive: float = 60.0
    """A request that has not come in whole within this long is given up, and its connection closed."""
    connections: int = 8192
    """Connections open at once, or as many as the limit of open files leaves; others are told 503."""
    drain: float = 30.0
    """On SIGTERM, how long requests and streams that are open may go on."""
    reader_lease: float = LEASE_S
    """A request whose gateway is not heard of for this long is over: its task is cancelled."""
    max_queued: int | None = None
    """Tasks of a pool that may wait, all tiers together; past it they are refused with 429, lower tiers before that."""
    max_queued_per_tenant: int | None = None
    """Those of one tenant in a pool, as far as workers have sorted what waits."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may read answers (`https://chat.example.org`, or `*`); none: no page may."""
    awaited: tuple[str, ...] = ()
    """Models that have to be served once before this gateway says that it is ready."""
    sweep: bool = True
    """Whether this process also re-sends tasks that were recorded and never sent, and cancels those of lost readers."""
