"""Reads what the pool's other workers say of themselves, and tells this worker's breaker; on the housekeeper's thread.

docs/how/deaths.md has what happens when a worker dies between any two lines. Redis errors come through.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

from producers.broker.values import ListedWorker
from producers.connection.script import parsed_value, run
from producers.contract import keys
from producers.store.protocol import eject
from workers.breaker.breaker import Breaker, State
from workers.breaker.figures import Figures
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.state.delivery import Delivery
from workers.state.incarnation import Incarnation

#: Peers that one look reads: enough for a middle, however large the pool is.
READ: Final = 16


@dataclass(slots=True)
class Peers:
    """`queue`: the pool's."""

    store: Redis
    queue: str
    breaker: Breaker
    deliveries: Deliveries
    finisher: Finisher
    _entered: bool = field(init=False, default=False)
    """EJECT may have entered this worker."""

    def look(self, life: Incarnation, alive: Sequence[ListedWorker]) -> None:
        """Compare this worker with its peers. `alive`: all others that have a lease."""
        breaker, others = self.breaker, [one.incarnation for one in alive if one.queue == self.queue]
        breaker.peers = self._figures(others)
        if why := breaker.outlier():
            if self._granted(life, len(others) + 1):
                breaker.open(why)
        elif not breaker.closed:
            if not self.deliveries.held:
                breaker.on_idle()
            if not self._granted(life, len(others) + 1):
                breaker.refused()
        elif self._entered:
            self.store.srem(keys.ejected(self.queue), life.id)
            self._entered = False

    def give_back(self) -> None:
        """The breaker has opened: others go on with what its engine fails, or with what it has not begun."""
        if self.breaker.state is State.OPEN:
            for delivery in list(self.deliveries.running.values()):
                if self.breaker.alone or not _begun(delivery):
                    self.finisher.let_go(delivery, why="breaker")

    def _granted(self, life: Incarnation, living: int) -> bool:
        self._entered = True
        return bool(run(self.store, eject(life.id, self.queue, living, alone=self.breaker.alone)))

    def _figures(self, others: Sequence[str]) -> list[Figures]:
        """Figures of some peers that are not held back themselves."""
        chosen = random.sample(others, min(READ, len(others)))
        said: list[Any] = [parsed_value(raw) for raw in self.store.mget(map(keys.lease, chosen))] if chosen else []
        return [Figures.of(one.get("figures")) for one in said if isinstance(one, dict) and not one.get("breaker_open")]


def _begun(delivery: Delivery) -> bool:
    """Whether this worker has made tokens of it."""
    return any(delivery.entries)
