"""A glance at the queues of pools that want no worker: whether more waits there than the last reading saw.

It costs one round trip a queue, all at once, against five one after another for a whole reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from producers.admin.fleet import Fleet
from producers.broker.base import Broker
from producers.client.steps import FAILURES
from producers.contract import keys
from producers.contract.levels import looked_after
from workers.autoscaler.pools import PoolSettings

#: Time limit (s) of a glance.
LIMIT_S: Final = 1.0


class Glance:
    """`queues`: those to look at, by the number that waited there."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.queues: dict[str, int] = {}

    def see(self, fleet: Fleet, pools: Iterable[PoolSettings]) -> None:
        """Look at these pools' queues from now on. What the fleet says is known."""
        waiting = {keys.model_queue(queue.name): sum(queue.queued.values()) for queue in fleet.pools}
        self.queues = {name: waiting.get(name, 0) for pool in pools for name in _queues(fleet, pool)}

    async def more(self) -> bool:
        """Whether more waits now. A failure says nothing: the next reading tells."""
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await asyncio.gather(*(self._broker.waiting(name) for name in self.queues))
        except FAILURES:
            return False
        counts = dict(zip(self.queues, (sum(one.tiers.values()) for one in found), strict=True))
        more = any(count > self.queues[name] for name, count in counts.items())
        self.queues = counts
        return more


def _queues(fleet: Fleet, pool: PoolSettings) -> list[str]:
    """The queues that new tasks of the pool go to."""
    current = fleet.versions.get(pool.model)
    version = pool.version or current
    found = [] if version is None else looked_after(keys.version_queue(pool.model, version))
    return found + ([keys.model_queue(pool.model)] if pool.version in (None, current) else [])
