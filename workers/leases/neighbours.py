"""Looks whether neighbours' processes are alive, and takes over what dead ones held before their leases lapse.

Each incarnation looks at the two that follow it by name. docs/failover.md has the rules, and what happens when a
process dies or is cut off between any two lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import Listed
from producers.connection.alive import Seen, end, seen
from producers.connection.script import run
from workers.leases.control import Control
from workers.state.incarnation import Incarnation

logger = logging.getLogger(__name__)

#: Time (s) between two looks.
LOOK_S: Final = 0.25
#: For so many leases a worker must have been heard before its looks count.
STOOD_LEASES: Final = 1.0
#: Incarnations that each looks at.
LOOKED_AT: Final = 2


class Neighbours:
    """Looked at on the housekeeper's thread. `store`: None where the broker's leases are on the same server.

    `lease`: seconds of a lease. Redis errors come through.
    """

    def __init__(self, store: Redis | None, broker: Consumer, control: Control, lease: float) -> None:
        self._store = store
        self._broker = broker
        self._control = control
        self._stood = STOOD_LEASES * lease
        self._names: list[str] = []
        self._suspects: dict[str, float] = {}
        self.at = float("inf")
        """When the next look is due (monotonic)."""

    def learn(self, life: Incarnation, alive: Sequence[Listed]) -> None:
        """Choose whom to look at, from all others that have a lease."""
        ring = sorted(one.incarnation for one in alive)
        after = [name for name in ring if name > life.id]
        self._names = [*after, *ring][: min(LOOKED_AT, len(ring))]
        self.at = min(self.at, time.monotonic() + LOOK_S) if self._names else float("inf")

    def look(self, life: Incarnation) -> int:
        """Look if it is time to. Returns how many were taken over."""
        now = time.monotonic()
        if now < self.at:
            return 0
        self.at = now + LOOK_S
        suspects, self._suspects = self._suspects, {}  # a look that does not count begins anew
        if life.over or not life.begun or not self._control.stood(life, self._stood):
            return 0
        self._suspects = {name: suspects.get(name, now) for name in self._silent(life)}
        late = [name for name, first in self._suspects.items() if now - first >= LOOK_S]
        return sum(self._take(life, name) for name in late)

    def _silent(self, life: Incarnation) -> list[str]:
        """Those whom both servers find silent now."""
        here = self._broker.look(life.id, self._names) or {}
        silent = [name for name, what in here.items() if what is Seen.SILENT]
        if self._store is not None and silent:
            there = seen(self._store, life.id, silent) or {}
            silent = [name for name, what in there.items() if what is not Seen.LIVES]
        return silent

    def _take(self, life: Incarnation, name: str) -> bool:
        if self._store is not None and not run(self._store, end(name, life.id)):
            return False
        count = self._broker.reap(name, life.id)
        if count < 0:
            return False
        self._names.remove(name)
        logger.warning("Worker %s is dead: returned its %d deliveries to the queue", name, count)
        return True
