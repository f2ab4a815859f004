"""Keeps the worker's lease, and looks after what others left behind.

A thread with connections of its own: neither a busy event loop nor a consumer in reconnect back-off may let the lease
lapse. On each round it lets go of what its lapsed lives held, renews the lease on store and broker, reaps incarnations
whose lease is gone, ends tasks whose readers are gone and those that waited too long, gives back tasks that have been
preempted for long, compares this worker with its peers, keeps what it measured, and runs what the clock was asked to do
later. Between rounds it looks whether its neighbours live.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from redis import Redis

from producers.connection.log_throttle import warn_throttled
from producers.contract import keys
from producers.store.fleet import cards
from workers.breaker.breaker import Breaker
from workers.connect import LOST, connect
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.publisher import Publisher
from workers.leases.control import Control
from workers.leases.lease import Lease
from workers.leases.neighbours import Neighbours
from workers.leases.others import Others
from workers.leases.peers import Peers
from workers.leases.reconcile import Reconciler
from workers.measure.keeper import Keeper
from workers.state.clock import Clock
from workers.state.incarnation import Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)

TICK_S = 0.5
#: A lease is renewed four times before it lapses, and so often (s) at least; what others left is looked for as often.
ROUND_S = 5.0
#: A lease that was not renewed is looked at again so soon after its end.
REAP_AFTER_S = 0.02


class Housekeeper(threading.Thread):
    """`about`: what the lease says of this worker (JSON); `announce`: writes its model into a store."""

    def __init__(
        self,
        served: Served,
        deliveries: Deliveries,
        clock: Clock,
        publisher: Publisher,
        finisher: Finisher,
        about: Callable[[], str],
        announce: Callable[[Redis], object],
        keeper: Keeper,
        breaker: Breaker,
    ) -> None:
        super().__init__(name="penstock-housekeeper", daemon=True)
        self._served = served
        self._deliveries = deliveries
        self._clock = clock
        self._publisher = publisher
        self._finisher = finisher
        self._announce = announce
        self.keeper = keeper
        settings = served.settings
        # A lease must be renewed several times before it lapses, also when one try hangs.
        self._quarter = settings.lease / 4
        patience = min(5.0, self._quarter)
        self._store = connect(settings.store, timeout=patience)
        self._broker = served.connect_broker(patience)
        self.lease = Lease(served, self._store, self._broker, deliveries, clock, about)
        self.control = Control(list(dict.fromkeys((settings.store, served.control_url))), deliveries, publisher)
        self.control.on_change = self.renew_soon
        apart = self._store if served.control_url != settings.store else None
        self._neighbours = Neighbours(apart, self._broker, self.control, settings.lease)
        self._reconciler = Reconciler(self._store, self._broker, deliveries)
        self._others = Others(served, self._store, self._broker)
        self._peers = Peers(self._store, served.pool.queue, breaker, deliveries, finisher)
        self._pause = min(ROUND_S, self._quarter)
        self._heard_at = time.monotonic()
        self._renew_at = 0.0
        self._look_at = 0.0
        self._stopping = False
        deliveries.on_lapse = self.lease.lapsed

    def begin_life(self, life: Incarnation) -> None:
        """Take the lease. Raises redis errors."""
        self._renew_at = time.monotonic() + self._pause
        self.control.listen(life)
        self.lease.take(life)

    def breaker_changed(self) -> None:
        """Renew at once, and give back what others are to go on with. Any thread."""
        self._clock.later(0.0, self._peers.give_back)
        self.renew_soon()

    def renew_soon(self) -> None:
        """Renew at once: what the lease says has changed."""
        self._renew_at = 0.0
        self._clock.wake()

    def stop(self) -> None:
        self._stopping = True
        self.control.stop()
        self._clock.wake()

    # ---- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        tick = min(TICK_S, self._served.settings.lease / 8)
        while not self._stopping:
            # First of all: a worker that starts anew finds at once what its predecessor left.
            self._guarded(self._round)
            self._guarded(self._look_at_neighbours)
            for action in self._clock.wait(tick, self._next_at):
                self._guarded(action)

    def _round(self) -> None:
        life = self._deliveries.life
        self.lease.let_lapsed_go()
        if life.over:
            return
        now = time.monotonic()
        if not life.begun or now >= self._renew_at:
            if not life.begun:
                self._announce_again()
                self.begin_life(life)
            else:
                self._renew_at = now + self._pause
                if not self.lease.renew(life):
                    self._deliveries.life_is_over(life)
                    return
                self._reconciler.look(life)
            if now - self._heard_at > 2 * self._quarter:
                # The servers were away, or we were: let the others say first that they live, if they do.
                self._look_at = now + self._quarter
            self._heard_at = now
        if now >= self._look_at:
            self._look_at = now + self._pause
            alive = self._others.reap(life)
            soonest = min((one.left for one in alive if one.left is not None), default=float("inf"))
            self._look_at = min(self._look_at, now + soonest + REAP_AFTER_S)
            self._neighbours.learn(life, alive)
            self._peers.look(life, alive)
            self._others.adopt(alive)
            self._others.end_unwanted()
            self._served.weights = self._broker.weights()
            card = cards.read(self._store, self._served.model)
            self._served.takes_plain = cards.takes_new(card, self._served.pool.version)
        self._release_preempted()
        self.keeper.keep_now_and_then(self._store)

    def _look_at_neighbours(self) -> None:
        if self._neighbours.look(self._deliveries.life):
            self._look_at = 0.0  # its pool may have nobody left

    def _next_at(self) -> float:
        return min(self._look_at, self._expire(), self._neighbours.at)

    def _announce_again(self) -> None:
        """A store that has lost the lease may have lost all: then nobody would know this model any more."""
        if not self._store.hexists(keys.POOLS, self._served.pool.queue):
            logger.warning("The store has forgotten %s: announcing it again", self._served.model)
            self._announce(self._store)

    def _expire(self) -> float:
        """End what is too late; when the next of what runs will be."""
        now, nearest = time.monotonic(), float("inf")
        for delivery in list(self._deliveries.running.values()):
            if delivery.deadline is None:
                continue
            if delivery.deadline <= now:
                delivery.deadline = None
                self._publisher.conclude_late(delivery)
            else:
                nearest = min(nearest, delivery.deadline)
        return nearest

    def _release_preempted(self) -> None:
        patience = self._served.settings.release_preempted
        late = [uuid for uuid, waited in self._served.engine.preempted() if waited >= patience]
        found = [d for uuid in late if (d := self._deliveries.running.get(uuid)) is not None]
        if found:
            logger.info("Giving %d tasks back that were preempted for %.0f s", len(found), patience)
            for delivery in found:
                self._finisher.let_go(delivery, why="preempted")

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except LOST as exc:
            warn_throttled(logger, "Housekeeping: the store or the broker is away, trying again: %s", exc)
            self._renew_at = 0.0
            self._look_at = max(self._look_at, time.monotonic() + TICK_S)  # what was due is not due again at once
        except Exception:
            logger.exception("Housekeeping failed, going on")
