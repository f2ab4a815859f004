"""The books: every delivery in this worker's hands, from FETCH until ACK or BACK.

    enter -> held -> run -> running -> stop -> done (ACK) or give_back (BACK)

A delivery is put down exactly once: settled and acknowledged, given back, or dropped because its incarnation is over
(then REAP returns it).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final

from workers.flow.acker import Acker
from workers.state.delivery import Delivery, forget
from workers.state.incarnation import Incarnation
from workers.state.ledger import Ledger, Size
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: Deliveries that wait in the engine of which the lease tells.
WAITS: Final = 64


class Deliveries:
    """Thread-safe. `held` and `running` are keyed by the delivery's UUID."""

    def __init__(self, served: Served, acker: Acker) -> None:
        self._name = served.settings.name
        self._abort: Callable[[str], None] = served.engine.abort
        self._acker = acker
        self.ledger = Ledger((served.engine.max_num_seqs, served.engine.kv_tokens_total))
        self.life = Incarnation(self._name)
        """The present one; it is another as soon as its lease is gone."""
        self.held: dict[str, Delivery] = {}
        self.running: dict[str, Delivery] = {}
        """Deliveries that the engine computes."""
        self.asked: list[str] = []
        """UUIDs that the next FETCH names: it may have come, and its answer been lost."""
        self.draining = False
        """Whether the worker drains: it fetches no more and begins no new incarnation."""
        self.held_back = False
        """Whether its breaker lets the worker fetch nothing: another pool may go on with what its pool had begun."""
        self.changed = threading.Condition()
        """Notified when something was put down."""
        self.on_put_down: Callable[[], None] = lambda: None
        """Called, on any thread, when something was put down."""
        self.on_lapse: Callable[[Incarnation, list[Delivery]], None] = lambda life, dropped: None
        """Called, on any thread and under `changed`, with what a lapsed life held."""

    def __len__(self) -> int:
        return len(self.held)

    def known(self) -> set[str]:
        """UUIDs of all that is held, or on its way in or out."""
        return {*self.asked, *self.held, *self._acker.pending}

    def waits(self) -> dict[str, str]:
        """UUID -> why, of those that wait in the engine (`Delivery.waits`); some of them, where there are many."""
        waiting = ((one.uuid, one.waits) for one in list(self.running.values()))
        return dict(islice(((uuid, why) for uuid, why in waiting if why is not None), WAITS))

    def enter(self, delivery: Delivery, size: Size) -> bool:
        """Enter a fetched message; False where its life is over."""
        with self.changed:
            if delivery.incarnation.over:
                return False
            self.ledger.hold(delivery.uuid, size)
            self.held[delivery.uuid] = delivery
            return True

    def stop(self, delivery: Delivery) -> bool:
        """The engine makes no more tokens of it; False where it made none."""
        if self.running.pop(delivery.uuid, None) is None:
            return False
        self._abort(delivery.uuid)
        return True

    # ---- putting down ---------------------------------------------------------------------------------------------

    def done(self, delivery: Delivery, reason: str = "", *, settled: bool = False) -> None:
        """ACK: nobody needs the message any more. `settled`: because its task is, or has no record."""
        task = delivery.task_id if settled else ""
        ack = partial(self._acker.ack, delivery.incarnation, delivery.uuid, reason, delivery.used, task)
        self._put_down(delivery, ack)

    def give_back(self, delivery: Delivery, delay: float = 0.0, to: str = "") -> None:
        """BACK: another worker's, or nobody's yet; in the queue `to`, if that is another. What was claimed must be
        released first (`Finisher.let_go`)."""
        self._put_down(delivery, lambda: self._acker.back(delivery.incarnation, delivery.uuid, delay, to))

    def _put_down(self, delivery: Delivery, errand: Callable[[], None]) -> None:
        """Take it out of the books, once. The errand is on its way before that is seen: a drain waits for empty books,
        and what is in flight then without one is reaped."""
        with self.changed:
            if delivery.put_down:
                return
            delivery.put_down = True
            self.running.pop(delivery.uuid, None)
        errand()
        with self.changed:
            self.held.pop(delivery.uuid, None)
            self.changed.notify_all()
        self.ledger.release(delivery.uuid)
        self.on_put_down()
        _forget(delivery)

    def life_is_over(self, life: Incarnation) -> None:
        """Our lease is gone: drop everything at once (others may hold it by now) and begin anew.

        Where the store was away, or we were stopped, nobody may have taken it up yet: then it is let go first, so that
        no death is counted (`Lease.let_lapsed_go`).
        """
        with self.changed:
            if life.over or life is not self.life:
                return
            life.over = True
            dropped, running = list(self.held.values()), list(self.running)
            for delivery in dropped:
                delivery.put_down = True
            self.on_lapse(life, dropped)  # before the books are seen empty: a drain exits then, and would leave these
            self.held.clear()
            self.running.clear()
            self.ledger.clear()
            self.changed.notify_all()
        logger.warning("The lease of %s lapsed: dropping %d deliveries, beginning anew", life.id, len(dropped))
        for uuid in running:
            self._abort(uuid)
        self.on_put_down()
        for delivery in dropped:
            _forget(delivery)
        if not self.draining:
            self.life = Incarnation(self._name)  # the housekeeper takes its lease on its next round


def _forget(delivery: Delivery) -> None:
    if delivery.job is not None:
        forget(delivery.job.request)
