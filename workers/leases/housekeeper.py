"""Keeps the worker's lease, and looks after what others left behind.

A thread with connections of its own: neither a busy event loop nor a consumer in reconnect back-off may let the lease
lapse. Its duties are a list with their periods (`Housekeeper._in_order`). Beside them it ends tasks whose deadline has
passed, and runs what the clock was asked to do later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from redis import Redis

from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import error_text
from producers.contract import keys
from producers.store.epoch import EpochChanged
from producers.store.fleet import cards
from workers.breaker.breaker import Breaker
from workers.connect import LOST, connect
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.publisher import Publisher
from workers.leases.control import Control
from workers.leases.lease import Lease, Reconciler
from workers.leases.neighbours import LOOK_S, Neighbours
from workers.leases.others import Others
from workers.leases.peers import Peers
from workers.measure.measured import Keeper
from workers.state.clock import Clock
from workers.state.delivery import Delivery
from workers.state.incarnation import Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)

TICK_S = 0.5
#: A lease is renewed four times before it lapses, and so often (s) at least; what others left is looked for as often.
ROUND_S = 5.0
#: What was measured is kept this often (s).
KEEP_S = 10.0
#: A lease that was not renewed is looked at again so soon after its end.
REAP_AFTER_S = 0.02
#: Who has joined is known to its neighbours after this time (s) at the latest; many that join at once cost one round.
KNOWN_S = 1.0


@dataclass(slots=True)
class Duty:
    """Done every so many seconds. `at`: when it is due (monotonic)."""

    do: Callable[[], None]
    every: float
    at: float = 0.0


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
        self.on_epoch: Callable[[str], None] = lambda why: None
        """Called with the reason where the store was restored: this worker must end."""
        apart = self._store if served.control_url != settings.store else None
        self._neighbours = Neighbours(apart, self._broker, self.control, settings.lease)
        self._neighbours.on_join = self._one_joined
        self._reconciler = Reconciler(self._store, self._broker, deliveries)
        self._others = Others(served, self._store, self._broker)
        self._peers = Peers(self._store, served.pool.queue, breaker, deliveries, finisher)
        self._heard_at = self._round_at = self._quiet_until = time.monotonic()
        self._error = ""
        """The error of the last round that failed; empty: none has."""
        self._life = deliveries.life
        """This round's."""
        self._stopping = False
        self._tick = min(TICK_S, settings.lease / 8)
        pause = min(ROUND_S, self._quarter)
        self._renewal, self._look = Duty(self._renew, pause), Duty(self._see_to_others, pause)
        self._duties = self._in_order(pause)
        deliveries.on_lapse = self._lapsed

    def _in_order(self, pause: float) -> tuple[Duty, ...]:
        """All at once at the start: who starts anew finds at once what its predecessor left."""
        return (
            self._renewal,
            self._look,
            Duty(self._read_what_changes, pause),
            Duty(self._release_preempted, self._tick),
            Duty(partial(self.keeper.keep, self._store), KEEP_S),
            Duty(self._look_at_neighbours, LOOK_S),
        )

    def begin_life(self, life: Incarnation) -> None:
        """Take the lease. Raises redis errors."""
        self._renewal.at = time.monotonic() + self._renewal.every
        self.control.listen(life)
        self.lease.take(life)

    def breaker_changed(self) -> None:
        """Renew at once, and give back what others are to go on with. Any thread."""
        self._clock.later(0.0, self._peers.give_back)
        self.renew_soon()

    def renew_soon(self) -> None:
        """Renew at once: what the lease says has changed. Any thread."""
        self._renewal.at = time.monotonic()
        self._clock.wake()

    def unrenewed(self) -> str:
        """Since when, and why, the lease was not renewed, where that is longer than it lasts; else empty."""
        age = time.monotonic() - self._heard_at
        lapsed = self._error and age > self._served.settings.lease
        return f"its lease was not renewed for {age:.0f} s: {self._error}" if lapsed else ""

    def stop(self) -> None:
        self._stopping = True
        self.control.stop()
        self._clock.wake()

    # ---- the thread -------------------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._stopping:
            self._guarded(self._round)
            for action in self._clock.wait(self._tick, self._next_at):
                self._guarded(action)

    def _round(self) -> None:
        """Let go of what lapsed lives held, then do what is due. Where this life ends, the rest waits for that."""
        self._round_at = time.monotonic()
        self._life = life = self._deliveries.life
        self.lease.let_lapsed_go()
        for duty in self._duties:
            if life.over:
                return
            if (now := time.monotonic()) >= duty.at:
                duty.at = now + duty.every
                duty.do()

    def _next_at(self) -> float:
        """When the next round is to be. What this one left undone is tried again a tick later."""
        coming = (duty.at for duty in self._duties if duty.at > self._round_at)
        return min([self._expire(), *coming])

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except LOST as exc:
            self._error = error_text(exc)
            warn_throttled(logger, "Housekeeping: the store or the broker cannot be used, trying again: %s", exc)
            self._renewal.at = self._round_at
        except EpochChanged as exc:
            self.on_epoch(str(exc))
        except Exception:
            logger.exception("Housekeeping failed, going on")

    # ---- duties -----------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """The lease; a new life takes one. Then what a failover brought back."""
        life = self._life
        if not life.begun:
            self._announce_again()
            self.begin_life(life)
        elif self.lease.renew(life):
            self._reconciler.look(life)
        else:
            self._deliveries.life_is_over(life)
            return
        now = time.monotonic()
        if now - self._heard_at > 2 * self._quarter:
            # The servers were away, or we were: let the others say first that they live, if they do.
            self._look.at = self._quiet_until = now + self._quarter
        self._heard_at = now

    def _lapsed(self, life: Incarnation, dropped: list[Delivery]) -> None:
        """Any thread: the next life begins at once."""
        self.lease.lapsed(life, dropped)
        self.renew_soon()

    def _see_to_others(self) -> None:
        """Dead workers, the pool's other workers, pools without a worker, tasks that nobody waits for."""
        now, life = time.monotonic(), self._life
        alive = self._others.reap(life)
        soonest = min((one.remaining_s for one in alive if one.remaining_s is not None), default=float("inf"))
        self._look.at = min(self._look.at, now + soonest + REAP_AFTER_S)
        self._neighbours.learn(life, alive)
        self._peers.look(life, alive)
        self._others.adopt(alive)
        self._others.end_unwanted()

    def _read_what_changes(self) -> None:
        """Tenants' shares, and whether this version takes plain Celery tasks."""
        served = self._served
        served.weights = self._broker.weights()
        served.takes_plain = cards.takes_new(cards.read(self._store, served.model), served.pool.version)

    def _look_at_neighbours(self) -> None:
        if self._neighbours.look(self._life):
            self._look_within(0.0)  # its pool may have nobody left

    def _one_joined(self) -> None:
        """It judges what our lease says from now on, and we are to look at it."""
        self.renew_soon()
        self._look_within(KNOWN_S)

    def _look_within(self, seconds: float) -> None:
        """But not before those that were away have had the time to say that they live."""
        self._look.at = max(self._quiet_until, min(self._look.at, time.monotonic() + seconds))

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
