"""The autoscaler: leads, reads the fleet, decides each pool's number, keeps the decisions, acts on them.

acquire the lead ─▶ tick: read once ─▶ decide each pool ─▶ keep (SCALE, fenced by the lead) ─▶ act ─▶ rest ─▶ tick
                      ▲                                        │ another leads
                      └──────────────── acquire ◀──────────────┘
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field

from producers.client.aio import AsyncClient
from workers.autoscaler.pools import Pools


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    """Settings of one autoscaler. Times are seconds."""

    name: str = field(default_factory=lambda: f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}")
    lease: float = 5.0
    """Silence of the leader after which another autoscaler leads."""
    every: float = 1.0
    """Interval between ticks."""
    glance: float = 0.1
    """Interval of looks at the queues of pools that want no worker, so that a first task is seen at once."""
    look: float = 5.0
    """Longest time between two questions to an actuator what there is."""


class Autoscaler:
    """One process's autoscaler. Any number run, and one leads.

    Use: `task = asyncio.create_task(Autoscaler(client, pools).run())`, and `task.cancel()` at the end.
    """

    def __init__(self, client: AsyncClient, pools: Pools, settings: AutoscalerSettings | None = None) -> None:
        self._client = client
        self._pools = pools
        self.settings = settings or AutoscalerSettings()
        self.leads = False

    async def run(self) -> None:
        """Scale whenever this process leads, until cancelled; then give the lead up at once."""
        raise NotImplementedError

    def unready(self) -> list[str]:
        """Why it does not do its work now; empty while it leads, or stands by, as it should."""
        return []
