"""The books: every delivery in this worker's hands, from FETCH until ACK or BACK.

    enter -> held -> run -> running -> stop, end -> done (ACK) or give_back (BACK)

A delivery is put down exactly once: settled and acknowledged, given back, or dropped because its incarnation is over
(then REAP returns it). `workers.state.delivery` has its stages, which change here alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final

from workers.flow.acker import Acker
from workers.state.delivery import Delivery, Stage, forget
from workers.state.incarnation import Incarnation
from workers.state.ledger import Ledger, Size
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: Deliveries that wait in the engine of which the lease tells.
WAITS: Final = 64


class Deliveries:
    """Thread-safe. `held` and `running` are keyed by the delivery's UUID; others only read them."""

    def __init__(self, served: Served, acker: Acker) -> None:
        self._name = served.settings.name
        self._abort: Callable[[str], None] = served.engine.abort
        self._acker = acker
        self.ledger = Ledger((served.engine.max_num_seqs, served.engine.kv_tokens_total))
        self.life = Incarnation(self._name)
        """The present one; it is another as soon as its lease is gone."""
        self.held: dict[str, Delivery] = {}
        self.running: dict[str, Delivery] = {}
        """Those of stage RUNNING, which the engine computes."""
        self.survived: deque[str] = deque()
        """Tasks whose redeliveries the broker is to forget before the next FETCH."""
        self.asked: list[str] = []
        """UUIDs that the next FETCH names: it may have come, and its answer been lost."""
        self.draining = False
        """Whether the worker drains: it fetches no more and begins no new incarnation."""
        self.most: int | None = None
        """Deliveries that the worker's breaker lets it hold; None: as many as fit. What is held stays."""
        self.changed = threading.Condition()
        """Notified when something was put down."""
        self.on_put_down: Callable[[], None] = lambda: None
        """Called, on any thread, when something was put down."""
        self.on_lapse: Callable[[Incarnation, list[Delivery]], None] = lambda life, dropped: None
        """Called, on any thread and under `changed`, with what a lapsed life held."""

    def __len__(self) -> int:
        return len(self.held)

    @property
    def serves(self) -> bool:
        """Whether it may fetch; another pool may go on with what the pool of a worker that may not had begun."""
        return not self.draining and self.most != 0

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

    def got_on(self, delivery: Delivery) -> None:
        """A token of it is published. Deaths before that count against its message no more, as in its record.

        Else a long task that outlived several workers would be a suspect to FETCH, and hold up its tenant."""
        if delivery.returned and not delivery.incarnation.over:
            delivery.returned = False
            self.survived.append(delivery.task_id)
            self.ledger.on_room()

    def run(self, delivery: Delivery) -> bool:
        """The engine is about to have it; False where it is too late for that."""
        return self._move(delivery, Stage.RUNNING)

    def stop(self, delivery: Delivery) -> bool:
        """The engine makes no more tokens of it, and failed it; False where it has stopped already."""
        return self._leave(delivery, Stage.STOPPED)

    def end(self, delivery: Delivery) -> None:
        """The engine makes no more tokens of it, and no other end counts."""
        self._leave(delivery, Stage.ENDED)

    def _leave(self, delivery: Delivery, stage: Stage) -> bool:
        """First the stage: a claimer that still starts it looks there once the engine has it."""
        moved = self._move(delivery, stage)
        self._abort(delivery.uuid)
        return moved

    def _move(self, delivery: Delivery, stage: Stage) -> bool:
        """False where it has come so far already."""
        with self.changed:
            if delivery.stage >= stage:
                return False
            delivery.stage = stage
            if stage is Stage.RUNNING:
                self.running[delivery.uuid] = delivery
            else:
                self.running.pop(delivery.uuid, None)
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
        if not self._move(delivery, Stage.PUT_DOWN):
            return
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
                self._move(delivery, Stage.PUT_DOWN)
            self.on_lapse(life, dropped)  # before the books are seen empty: a drain exits then, and would leave these
            self.held.clear()
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
