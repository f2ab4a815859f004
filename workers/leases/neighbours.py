"""Looks whether neighbours' processes are alive, and takes over what dead ones held before their leases lapse.

Each incarnation looks at the two that follow it by name. docs/failover.md has the rules, and what happens when a
process dies or is cut off between any two lines.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import Listed
from producers.connection.alive import Seen, end, seen
from producers.connection.script import run
from workers.leases.control import Control
from workers.state.incarnation import Incarnation

logger = logging.getLogger(__name__)

#: Time (s) between two looks, as the housekeeper calls for them.
LOOK_S: Final = 0.25
#: For so many leases a worker must have been heard before its looks count.
STOOD_LEASES: Final = 1.0
#: Incarnations that each looks at.
LOOKED_AT: Final = 2


@dataclass(slots=True)
class Neighbours:
    """Looked at on the housekeeper's thread. `store`: None where the broker's leases are on the same server.

    `lease`: seconds of a lease. Redis errors come through.
    """

    store: Redis | None
    broker: Consumer
    control: Control
    lease: float
    _names: list[str] = field(init=False, default_factory=list)
    _suspects: set[str] = field(init=False, default_factory=set)

    def learn(self, life: Incarnation, alive: Sequence[Listed]) -> None:
        """Choose whom to look at, from all others that have a lease."""
        ring = sorted(one.incarnation for one in alive)
        after = [name for name in ring if name > life.id]
        self._names = [*after, *ring][: min(LOOKED_AT, len(ring))]

    def look(self, life: Incarnation) -> int:
        """Take those over that are silent for the second time in a row. Returns how many."""
        suspects, self._suspects = self._suspects, set()  # a look that does not count begins anew
        if not self._names or not life.begun or not self.control.stood(life, STOOD_LEASES * self.lease):
            return 0
        self._suspects = {*self._silent(life)}
        return sum(self._take(life, name) for name in sorted(suspects & self._suspects))

    def _silent(self, life: Incarnation) -> list[str]:
        """Those whom both servers find silent now."""
        here = self.broker.look(life.id, self._names) or {}
        silent = [name for name, what in here.items() if what is Seen.SILENT]
        if self.store is not None and silent:
            there = seen(self.store, life.id, silent) or {}
            silent = [name for name, what in there.items() if what is not Seen.LIVES]
        return silent

    def _take(self, life: Incarnation, name: str) -> bool:
        if self.store is not None and not run(self.store, end(name, life.id)):
            return False
        count = self.broker.reap(name, life.id)
        if count < 0:
            return False
        self._names.remove(name)
        logger.warning("Worker %s is dead: returned its %d deliveries to the queue", name, count)
        return True
