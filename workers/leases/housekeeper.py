"""Keeps the worker's lease, and repairs what other workers left behind.

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
from workers.breaker import Breaker
from workers.connect import LOST, connect
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.publisher import Publisher
from workers.leases.control import Control
from workers.leases.holdings import Holdings
from workers.leases.lease import Lease, Reconciler
from workers.leases.neighbours import LOOK_S, Neighbours, Others, Peers
from workers.measure import SEND_S, Keeper
from workers.state.clock import Clock
from workers.state.delivery import Delivery, Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)

TICK_S = 0.5
#: A lease is renewed four times before it lapses, and at least this often (s). Dead workers are looked for as often.
ROUND_S = 5.0
#: Measurements are stored this often (s).
KEEP_S = 10.0
#: A lease that was not renewed is looked at again so soon after its end.
REAP_AFTER_S = 0.02
#: Neighbours learn of a worker that has joined within this time (s). Many that join at once cost one round.
KNOWN_S = 1.0


@dataclass(slots=True)
class Duty:
    """Done every so many seconds. `at`: when it is due (monotonic)."""

    do: Callable[[], None]
    every: float
    at: float = 0.0


class Housekeeper(threading.Thread):
    """`describe`: makes the description of this worker (JSON) in its lease; `announce`: writes its model into a
    store."""

    def __init__(
        self,
        served: Served,
        deliveries: Deliveries,
        clock: Clock,
        publisher: Publisher,
        finisher: Finisher,
        describe: Callable[[], str],
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
        self.lease = Lease(served, self._store, self._broker, deliveries, clock, describe)
        self.control = Control(list(dict.fromkeys((settings.store, served.control_url))), deliveries, publisher)
        self.control.on_change = self.renew_soon
        self.on_epoch: Callable[[str], None] = lambda why: None
        """Called with the reason if the store was restored: this worker must end."""
        apart = self._store if served.control_url != settings.store else None
        self._neighbours = Neighbours(apart, self._broker, self.control, settings.lease)
        self._neighbours.on_join = self._worker_joined
        self.holdings = Holdings(served, self._broker, deliveries)
        self._reconciler = Reconciler(self._store, self._broker, deliveries)
        self._others = Others(served, self._store, self._broker)
        self._peers = Peers(self._store, served.pool.queue, breaker, deliveries, finisher)
        self._renewed_at = self._round_at = self._quiet_until = time.monotonic()
        self._error = ""
        """The error of the last round that failed; empty if none has."""
        self._life = deliveries.life
        """The life in which this round began."""
        self._stopping = False
        self._tick = min(TICK_S, settings.lease / 8)
        pause = min(ROUND_S, self._quarter)
        self._renewal, self._look = Duty(self._renew, pause), Duty(self._see_to_others, pause)
        self._duties = self._in_order(pause)
        deliveries.on_lapse = self._lapsed

    def _in_order(self, pause: float) -> tuple[Duty, ...]:
        """All are due at the start, so a restarted worker finds at once what its predecessor left."""
        return (
            self._renewal,
            self._look,
            Duty(self._read_what_changes, pause),
            Duty(self._release_preempted, self._tick),
            Duty(lambda: self.holdings.tell(self._life), self._tick),
            Duty(partial(self.keeper.keep, self._store), KEEP_S),
            Duty(partial(self.keeper.send, self._store), SEND_S),
            Duty(self._look_at_neighbours, LOOK_S),
        )

    def begin_life(self, life: Incarnation) -> None:
        """Takes the lease for a life. Raises redis errors."""
        self._renewal.at = time.monotonic() + self._renewal.every
        self.control.listen(life)
        self.lease.take(life)

    def breaker_changed(self) -> None:
        """Renews the lease at once, and gives back tasks that others are to continue. Any thread."""
        self._clock.later(0.0, self._peers.give_back)
        self.renew_soon()

    def renew_soon(self) -> None:
        """Renews the lease at once, since its description has changed. Any thread."""
        self._renewal.at = time.monotonic()
        self._clock.wake()

    def unrenewed(self) -> str:
        """Returns since when and why the lease was not renewed, if it must have lapsed; else an empty text."""
        age = time.monotonic() - self._renewed_at
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
        """Lets go what lapsed lives held, then does the duties that are due. If this life ends, the others wait for the
        next round."""
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
        """Returns when the next round is (monotonic). A failed duty is tried again a tick later."""
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
        """Renews the lease, or takes one for a new life, and gives back what a failover brought back."""
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
        if now - self._renewed_at > 2 * self._quarter:
            # The servers were away, or we were: let the others say first that they live, if they do.
            self._look.at = self._quiet_until = now + self._quarter
        self._renewed_at = now

    def _lapsed(self, life: Incarnation, dropped: list[Delivery]) -> None:
        """Begins the next life at once. Any thread."""
        self.lease.lapsed(life, dropped)
        self.renew_soon()

    def _see_to_others(self) -> None:
        """Sees to dead workers, the pool's other workers, pools without a worker, and tasks that nobody waits for."""
        now, life = time.monotonic(), self._life
        alive = self._others.reap(life)
        soonest = min((worker.remaining_s for worker in alive if worker.remaining_s is not None), default=float("inf"))
        self._look.at = min(self._look.at, now + soonest + REAP_AFTER_S)
        self._neighbours.learn(life, alive)
        self._peers.look(life, alive)
        self._others.adopt(alive)
        self._others.end_unwanted()

    def _read_what_changes(self) -> None:
        """Reads tenants' shares, and whether this version takes plain Celery tasks. Announces its model again where the
        card was removed or withdrawn, of whatever version."""
        served = self._served
        served.weights = self._broker.weights()
        card = cards.read(self._store, served.model)
        served.takes_plain = cards.takes_new(card, served.pool.version)
        if card is None or "withdrawn" in card:
            logger.warning("The model %s is not listed any more: announcing it again", served.model)
            self._announce(self._store)

    def _look_at_neighbours(self) -> None:
        if self._neighbours.look(self._life):
            self._look_within(0.0)  # its pool may have nobody left

    def _worker_joined(self) -> None:
        """A worker that has joined judges our lease only if it is renewed from now on, and we are to look at it."""
        self.renew_soon()
        self._look_within(KNOWN_S)

    def _look_within(self, seconds: float) -> None:
        """Looks at others within so many seconds, but not before those that were away could renew their leases."""
        self._look.at = max(self._quiet_until, min(self._look.at, time.monotonic() + seconds))

    def _announce_again(self) -> None:
        """Announces the model again if the store has lost it with the lease: else no client would know this model any
        more."""
        if not self._store.hexists(keys.POOLS, self._served.pool.queue):
            logger.warning("The store has forgotten %s: announcing it again", self._served.model)
            self._announce(self._store)

    def _expire(self) -> float:
        """Ends tasks whose deadline has passed. Returns when the next deadline is (monotonic)."""
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
        deliveries = [d for uuid in late if (d := self._deliveries.running.get(uuid)) is not None]
        if deliveries:
            logger.info("Giving %d tasks back that were preempted for %.0f s", len(deliveries), patience)
            for delivery in deliveries:
                self._finisher.let_go(delivery, why="preempted")
