"""Takes, renews and gives up the worker's lease on store and broker, and lets go what a lapsed lease left.

`Reconciler` lets go what a server brings back.
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
from workers.state.delivery import Delivery, Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Lease:
    """`describe`: makes the description of the worker in its lease (JSON). Redis errors come through."""

    served: Served
    store: Redis
    broker: Consumer
    deliveries: Deliveries
    clock: Clock
    describe: Callable[[], str]
    round_trip: float = field(init=False, default=0.0)
    """The round trip time (s) to the farther server at the last renewal."""
    false_takeovers: int = field(init=False, default=0)
    """The number of this worker's lives that another worker ended though it lived."""
    recomputed_tokens: int = field(init=False, default=0)
    """KV tokens of the deliveries it held then, which have to be computed again."""
    _lapsed: deque[tuple[Incarnation, list[Delivery]]] = field(init=False, default_factory=deque)
    _letting_go: threading.Lock = field(init=False, default_factory=threading.Lock)
    _taking: threading.Lock = field(init=False, default_factory=threading.Lock)
    _epoch: str | None = field(init=False, default=None)
    """The store's epoch when this worker began."""

    def take(self, life: Incarnation) -> None:
        """Takes the lease for a life, unless it was given up meanwhile. Raises EpochChanged if the store was restored
        since."""
        notify_lease(life.id)
        if self._epoch is None:
            self._epoch = epoch.read(self.store)
        description = self.describe()
        self._set_clock()
        with self._taking:
            if not life.over:
                if run(self.store, self._on_store(life, description, take=True)) == epoch.OTHER:
                    raise epoch.EpochChanged
                self.broker.take_lease(life.id, description, self.served.settings.lease)
                life.begun = True

    def renew(self, life: Incarnation) -> bool:
        """Returns False if one of the two leases is gone. Raises EpochChanged if the store was restored since."""
        self._set_clock()
        description = self.describe()
        sent_at = time.monotonic()
        on_store = run(self.store, self._on_store(life, description, take=False))
        if on_store == epoch.OTHER:
            raise epoch.EpochChanged
        between = time.monotonic()
        on_broker = self.broker.renew(life.id, description, self.served.settings.lease)
        self.round_trip = max(between - sent_at, time.monotonic() - between)
        return bool(on_store and on_broker)

    def _set_clock(self) -> None:
        """Sets the clock by the store's, at each renewal, as the store's clock may be set, too."""
        sent_at = time.monotonic()
        now = seconds(self.store.time())
        self.clock.set(now, (sent_at + time.monotonic()) / 2)

    def _on_store(self, life: Incarnation, description: str, *, take: bool) -> Call:
        """Makes the call that takes or renews the lease on the store. A worker that drains or is held back does not
        serve: another pool is to continue what its pool's last worker gives back. Where pools have no queues of their
        own, no worker serves: CLAIM sends nothing to a pool that nobody serves."""
        serves = self.deliveries.serves and self.broker.capabilities.pool_queues
        queue, ttl_ms = self.served.pool.queue, int(self.served.settings.lease * 1000)
        return lease(life.id, queue, description, ttl_ms, take=take, serves=serves, epoch=self._epoch or "")

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
            broker.leave(life.id, takers_of({text(queue): text(description) for queue, description in pools.items()}))
        except LOST as exc:
            logger.warning("The lease was not given up, it lapses by itself: %s", exc)

    def lapsed(self, life: Incarnation, dropped: list[Delivery]) -> None:
        """Notes a life of which a lease is gone. Its deliveries are let go before a new life begins, or the worker
        exits."""
        self._lapsed.append((life, dropped))

    def let_lapsed_go(self) -> None:
        """Sends RELEASE and BACK for deliveries of lapsed lives: their worker lives, so no death is to be counted.

        Whatever another took up meanwhile is not touched by either. After an error it is all said again.
        """
        with self._letting_go:
            while self._lapsed:
                life, dropped = self._lapsed[0]
                # No lease may make it look alive, and without one no late CLAIM of it is granted.
                self.store.delete(keys.lease(life.id))
                self.broker.end_lease(life.id)
                calls = [release(delivery.task_id, delivery.uuid, "lease_lost", delivery.run()) for delivery in dropped]
                _log_errors(run_many(self.store, calls))
                # The last first: each goes to the front of its list.
                _log_errors(self.broker.put_down([Back(life.id, delivery.uuid) for delivery in reversed(dropped)]))
                self.broker.reap(life.id)  # takes its name out of the books, and returns what our books did not have
                taken_over = self._take_counts_back(life, dropped)
                self._lapsed.popleft()
                if taken_over:
                    tokens = {delivery.uuid: delivery.used for delivery in dropped if delivery.record is not None}
                    self.recomputed_tokens += sum((life.lost | tokens).values())
                    self.false_takeovers += 1

    def _take_counts_back(self, life: Incarnation, dropped: Sequence[Delivery]) -> bool:
        """Takes back the deaths and returns that were counted for a life, if another worker took it for dead. Returns
        whether one did.

        After RELEASE, so that no CLAIM counts another one. A life that only lapsed keeps them (docs/how/failover.md).
        """
        returned = self.broker.retract(life.id)
        noted = read_retract(run(self.store, retract(life.id)))
        if returned is None and noted is None:
            return False
        tasks = {*(returned or ()), *(noted or ()), *(delivery.task_id for delivery in dropped)}
        logger.warning("%s was taken for dead: taking back what was counted against %d tasks", life.id, len(tasks))
        _log_errors(run_many(self.store, [absolve(task_id, life.id) for task_id in sorted(tasks)]))
        return True


def _log_errors(answers: Sequence[Any]) -> None:
    """Logs errors of single calls, each of which ends only its own call."""
    for answer in answers:
        if isinstance(answer, Exception):
            logger.warning("A dropped delivery was not let go, its lease lapsed: %s", answer)


@dataclass(slots=True)
class Reconciler:
    """Gives back messages that are in flight under this worker's name and not in its books; called several times a
    lease.

    A server that fails over, or is killed with `appendfsync everysec`, loses its last writes: that a task was settled
    and its message acknowledged, say. Then a live worker owns a message that it does not know, and no other may take
    it. So it looks for such strays, and what it finds twice it RELEASEs and gives BACK.
    """

    store: Redis
    broker: Consumer
    deliveries: Deliveries
    _strays: set[str] = field(init=False, default_factory=set)

    def look(self, life: Incarnation) -> None:
        """Gives back strays that are there for the second time, so not on their way in or out. Raises redis errors."""
        strays = self.broker.strays(life.id, sorted(self.deliveries.all_uuids()))
        lasting = {uuid: task_id for uuid, task_id in strays.items() if uuid in self._strays}
        self._strays = strays.keys() - lasting.keys()
        if not lasting:
            return
        logger.warning("A failover brought back %d tasks that had left here: they go back to the queue", len(lasting))
        run_many(self.store, [release(task_id, uuid) for uuid, task_id in lasting.items()])
        self.broker.put_down([Back(life.id, uuid) for uuid in lasting])
