"""What is in flight under this worker's name and not in its books.

A server that fails over, or is killed with `appendfsync everysec`, forgets the last that it was told: that a task was
settled and its message acknowledged, say. Then a live worker owns what it knows nothing of, and nobody else may take it
up. So it looks now and then, and what it finds twice it RELEASEs and gives BACK.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from redis import Redis

from producers.broker import redis as broker
from producers.connection.script import run, run_many
from producers.store.protocol import release
from workers.leases.incarnation import Incarnation

if TYPE_CHECKING:
    from workers.runtime.assembly import Runtime

logger = logging.getLogger(__name__)


class Strays:
    """Asked on the housekeeper's thread, several times a lease."""

    def __init__(self, runtime: Runtime, store: Redis, broker: Redis) -> None:
        self._runtime = runtime
        self._store = store
        self._broker = broker
        self._seen: set[str] = set()

    def look(self, life: Incarnation) -> None:
        """Give back what is there for the second time: what is on its way in or out is not. Raises redis errors."""
        runtime = self._runtime
        held = {*runtime.intake.asked, *runtime.deliveries, *runtime.courier.pending}
        found = broker.read_strays(run(self._broker, broker.strays(life.id, sorted(held))))
        lasting = {uuid: task_id for uuid, task_id in found.items() if uuid in self._seen}
        self._seen = found.keys() - lasting.keys()
        if not lasting:
            return
        logger.warning("A failover brought back %d tasks that had left here: they go back to the queue", len(lasting))
        run_many(self._store, [release(task_id, uuid) for uuid, task_id in lasting.items()])
        run_many(self._broker, [broker.back(life.id, runtime.queue, uuid) for uuid in lasting])
