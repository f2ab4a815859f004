"""Looks whether neighbours' processes are alive, and takes over what dead ones held before their leases lapse.

Each incarnation looks at the two that follow it by name. It judges leases that were written since it joined, and after
a whole lease all. docs/how/failover.md has the rules, and what happens when a process dies or is cut off between any
two lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import ListedWorker
from producers.connection.script import run
from producers.contract.leases import Liveness, end, join, observe
from workers.leases.control import Control
from workers.state.delivery import Incarnation

logger = logging.getLogger(__name__)

#: Time (s) between two looks, as the housekeeper calls for them.
LOOK_S: Final = 0.25
#: Once a worker has been subscribed for so many leases, its looks count whenever a lease was written.
STOOD_LEASES: Final = 1.0
#: Incarnations that each looks at.
LOOKED_AT: Final = 2


@dataclass(frozen=True, slots=True)
class Since:
    """The joins since when leases on store and broker count for a looker; 0: all do."""

    store: int
    broker: int


@dataclass(slots=True)
class Neighbours:
    """Looks run on the housekeeper's thread. `store`: None if the broker's leases are on the same server.

    `lease`: seconds of a lease. Redis errors come through.
    """

    store: Redis | None
    broker: Consumer
    control: Control
    lease: float
    on_join: Callable[[], None] = field(init=False, default=lambda: None)
    """Called when a worker has joined, this one too: it cannot judge a lease that was written before."""
    _names: list[str] = field(init=False, default_factory=list)
    _suspects: set[str] = field(init=False, default_factory=set)
    _subscriptions: tuple[float, ...] = field(init=False, default=())
    """The subscriptions under which it looks, as `Control.subscribed_since` has them."""
    _joined: Since | None = field(init=False, default=None)
    """With these subscriptions."""
    _joins: int = field(init=False, default=-1)
    """The broker's count, at the last look."""

    def learn(self, life: Incarnation, alive: Sequence[ListedWorker]) -> None:
        """Chooses whom to look at from all other workers that have a lease."""
        ring = sorted(worker.incarnation for worker in alive)
        after = [name for name in ring if name > life.id]
        self._names = [*after, *ring][: min(LOOKED_AT, len(ring))]

    def look(self, life: Incarnation) -> int:
        """Takes over workers that are silent for the second time in a row. Returns how many."""
        suspects, self._suspects = self._suspects, set()  # a look that does not count begins anew
        if not life.begun:
            return 0
        subscriptions = self.control.subscribed_since(life)
        if subscriptions != self._subscriptions:
            self._subscriptions, self._joined, suspects = subscriptions, None, set()
        since = self._since()
        here = self.broker.look(life.id, self._names if since else (), since.broker if since else 0)
        if here is None:
            return 0
        if here.joins != self._joins:
            self._joins = here.joins
            self.on_join()
        if subscriptions and self._joined is None:
            self._joined = self._join(life)
        if since is None:
            return 0
        silent = [name for name, liveness in here.others.items() if liveness is Liveness.SILENT]
        silent = self._silent_on_store(life, silent, since)
        if self.control.subscribed_since(life) != subscriptions:  # a server may have begun anew while it was asked
            return 0
        self._suspects = {*silent}
        return sum(self._take(life, name, since) for name in sorted(suspects & self._suspects))

    def _since(self) -> Since | None:
        """Returns since when leases count for this worker's looks; None: no look counts yet."""
        if self._subscriptions and time.monotonic() - max(self._subscriptions) >= STOOD_LEASES * self.lease:
            return Since(0, 0)
        return self._joined

    def _join(self, life: Incarnation) -> Since | None:
        """Joins on the store first: a worker that sees the broker's count raised renews its lease on both."""
        on_store = run(self.store, join(life.id)) if self.store is not None else 0
        if self.store is not None and not on_store:
            return None
        on_broker = self.broker.join(life.id)
        return Since(on_store, on_broker) if on_broker else None

    def _silent_on_store(self, life: Incarnation, names: Sequence[str], since: Since) -> list[str]:
        """Returns the workers that the store does not find alive, either."""
        if self.store is None or not names:
            return [*names]
        there = observe(self.store, life.id, names, since.store)
        return [name for name, liveness in there.others.items() if liveness is not Liveness.LIVES] if there else []

    def _take(self, life: Incarnation, name: str, since: Since) -> bool:
        if self.store is not None and not run(self.store, end(name, life.id, since.store)):
            return False
        count = self.broker.reap(name, life.id, since.broker)
        if count < 0:
            return False
        self._names.remove(name)
        logger.warning("Worker %s is dead: returned its %d deliveries to the queue", name, count)
        return True
