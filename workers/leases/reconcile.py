"""Gives back what is in flight under this worker's name and not in its books.

A server that fails over, or is killed with `appendfsync everysec`, forgets the last that it was told: that a task was
settled and its message acknowledged, say. Then a live worker owns what it knows nothing of, and nobody else may take it
up. So it looks now and then, and what it finds twice it RELEASEs and gives BACK.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import Back
from producers.connection.script import run_many
from producers.store.protocol import release
from workers.flow.deliveries import Deliveries
from workers.state.incarnation import Incarnation

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Reconciler:
    """Asked on the housekeeper's thread, several times a lease."""

    store: Redis
    broker: Consumer
    deliveries: Deliveries
    _seen: set[str] = field(init=False, default_factory=set)

    def look(self, life: Incarnation) -> None:
        """Give back what is there for the second time: what is on its way in or out is not. Raises redis errors."""
        found = self.broker.strays(life.id, sorted(self.deliveries.known()))
        lasting = {uuid: task_id for uuid, task_id in found.items() if uuid in self._seen}
        self._seen = found.keys() - lasting.keys()
        if not lasting:
            return
        logger.warning("A failover brought back %d tasks that had left here: they go back to the queue", len(lasting))
        run_many(self.store, [release(task_id, uuid) for uuid, task_id in lasting.items()])
        self.broker.put_down([Back(life.id, uuid) for uuid in lasting])
