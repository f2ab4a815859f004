"""The worker's lease, on store and broker: taken, renewed, given up; and what a lapsed one leaves is let go.

So is what a server brings back: see `Reconciler`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import Back
from producers.connection.script import Call, run, run_many, seconds, text
from producers.contract import keys
from producers.contract.keys import takers_of
from producers.contract.leases import read_retract, retract
from producers.store import epoch
from producers.store.protocol import absolve, lease, release
from workers.connect import LOST
from workers.flow.deliveries import Deliveries
from workers.processes.notify import notify_lease
from workers.state.clock import Clock
from workers.state.delivery import Delivery
from workers.state.incarnation import Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """`about`: what it says of the worker (JSON). Redis errors come through."""

    served: Served
    store: Redis
    broker: Consumer
    deliveries: Deliveries
    clock: Clock
    about: Callable[[], str]
    round_trip: float = field(init=False, default=0.0)
    """Round trip time (s) to the farther server, as measured by the last renewal."""
    false_takeovers: int = field(init=False, default=0)
    """Lives of this worker that another worker ended though it lived."""
    recomputed_tokens: int = field(init=False, default=0)
    """KV tokens of what it held then, which have to be computed again."""
    _lapsed: deque[tuple[Incarnation, list[Delivery]]] = field(init=False, default_factory=deque)
    _letting_go: threading.Lock = field(init=False, default_factory=threading.Lock)
    _taking: threading.Lock = field(init=False, default_factory=threading.Lock)
    _epoch: str | None = field(init=False, default=None)
    """The store's epoch when this worker began."""

    def take(self, life: Incarnation) -> None:
        """Begin this life, unless it was given up meanwhile. Raises EpochChanged where the store was restored since."""
        notify_lease(life.id)
        if self._epoch is None:
            self._epoch = epoch.read(self.store)
        about = self.about()
        self._set_clock()
        with self._taking:
            if not life.over:
                if run(self.store, self._on_store(life, about, take=True)) == epoch.OTHER:
                    raise epoch.EpochChanged
                self.broker.take_lease(life.id, about, self.served.settings.lease)
                life.begun = True

    def renew(self, life: Incarnation) -> bool:
        """False where one of the two is gone. Raises EpochChanged where the store was restored since."""
        self._set_clock()
        about = self.about()
        asked = time.monotonic()
        on_store = run(self.store, self._on_store(life, about, take=False))
        if on_store == epoch.OTHER:
            raise epoch.EpochChanged
        between = time.monotonic()
        on_broker = self.broker.renew(life.id, about, self.served.settings.lease)
        self.round_trip = max(between - asked, time.monotonic() - between)
        return bool(on_store and on_broker)

    def _set_clock(self) -> None:
        """At each renewal, since the store's clock may be set, too."""
        asked = time.monotonic()
        now = seconds(self.store.time())
        self.clock.set(now, (asked + time.monotonic()) / 2)

    def _on_store(self, life: Incarnation, about: str, *, take: bool) -> Call:
        """A worker that drains or is held back does not serve: what its pool's last worker gives back is for another
        pool. Nor does any where pools have no queues of their own: CLAIM sends nothing to a pool that nobody serves."""
        serves = self.deliveries.serves and self.broker.capabilities.pool_queues
        queue, ttl_ms = self.served.pool.queue, int(self.served.settings.lease * 1000)
        return lease(life.id, queue, about, ttl_ms, take=take, serves=serves, epoch=self._epoch or "")

    def give_up(self, life: Incarnation, store: Redis, broker: Consumer) -> None:
        """Give the lease up, so that nobody waits for it to lapse. Deliveries in flight are reaped.

        In two round trips, as they may be long and the time is short, on connections that have nothing else to do by
        now: ours may be at work. Where this was the last worker of its queues, their lists hold all that waits again:
        who looks at nothing but their lengths, as a scaler does, must see it. Raises no redis errors.
        """
        with self._taking:
            life.over = True
        try:
            self.let_lapsed_go()
            with store.pipeline(transaction=False) as pipe:
                pipe.delete(keys.lease(life.id))
                pipe.srem(keys.workers(self.served.pool.queue), life.id)
                pipe.hgetall(keys.POOLS)
                *_, pools = pipe.execute()
            broker.leave(life.id, takers_of({text(queue): text(about) for queue, about in pools.items()}))
        except LOST as exc:
            logger.warning("The lease was not given up, it lapses by itself: %s", exc)

    def lapsed(self, life: Incarnation, dropped: list[Delivery]) -> None:
        """One of its leases is gone. What it held is let go before a new life begins, or the worker exits."""
        self._lapsed.append((life, dropped))

    def let_lapsed_go(self) -> None:
        """RELEASE and BACK what lapsed lives held: their worker lives, so that no death is to be counted.

        Whatever another took up meanwhile is not touched by either. After an error it is all said again.
        """
        with self._letting_go:
            while self._lapsed:
                life, dropped = self._lapsed[0]
                # No lease may make it look alive, and without one no late CLAIM of it is granted.
                self.store.delete(keys.lease(life.id))
                self.broker.end_lease(life.id)
                calls = [release(one.task_id, one.uuid, "lease_lost", one.run()) for one in dropped]
                _log_errors(run_many(self.store, calls))
                # The last first: each goes to the front of its list.
                _log_errors(self.broker.put_down([Back(life.id, one.uuid) for one in reversed(dropped)]))
                self.broker.reap(life.id)  # takes its name out of the books, and returns what our books did not have
                taken = self._take_counts_back(life, dropped)
                self._lapsed.popleft()
                if taken:
                    held = {one.uuid: one.used for one in dropped if one.record is not None}
                    self.recomputed_tokens += sum((life.lost | held).values())
                    self.false_takeovers += 1

    def _take_counts_back(self, life: Incarnation, dropped: Sequence[Delivery]) -> bool:
        """Whether another took this life for dead: then no task keeps the death or the return counted for it.

        After RELEASE, so that no CLAIM counts another one. A life that only lapsed keeps them (docs/how/failover.md).
        """
        returned = self.broker.retract(life.id)
        noted = read_retract(run(self.store, retract(life.id)))
        if returned is None and noted is None:
            return False
        tasks = {*(returned or ()), *(noted or ()), *(one.task_id for one in dropped)}
        logger.warning("%s was taken for dead: taking back what was counted against %d tasks", life.id, len(tasks))
        _log_errors(run_many(self.store, [absolve(task_id, life.id) for task_id in sorted(tasks)]))
        return True


def _log_errors(answers: Sequence[Any]) -> None:
    """An error that is a single call's own ends that call."""
    for answer in answers:
        if isinstance(answer, Exception):
            logger.warning("A dropped delivery was not let go, its lease lapsed: %s", answer)


@dataclass(slots=True)
class Reconciler:
    """Gives back what is in flight under this worker's name and not in its books; asked several times a lease.

    A server that fails over, or is killed with `appendfsync everysec`, forgets the last that it was told: that a task
    was settled and its message acknowledged, say. Then a live worker owns what it knows nothing of, and nobody else may
    take it up. So it looks now and then, and what it finds twice it RELEASEs and gives BACK.
    """

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
