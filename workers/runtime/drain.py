"""The end of a worker: lets end what ends in time, and hands the rest back with its tokens.

    begin -> fetch no more -> wait -> the engine stops -> all it made is published -> RELEASE, BACK -> the lease -> exit

It runs on a thread of its own and waits for nobody for longer than it says: a store that hangs, a step that does not
end and an event loop that is stuck change what can be handed back, not when the process is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Final

from workers.flow.acker import Acker
from workers.flow.claimer import Claimer
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.intake import Intake
from workers.flow.publisher import Publisher
from workers.leases.housekeeper import Housekeeper
from workers.state.delivery import Delivery

logger = logging.getLogger(__name__)

#: Time limits (s): for handing back, and until the process has exited in any case.
HAND_BACK_S: Final = 1.5
EXIT_S: Final = 1.9
#: Round trips that handing back may take: one that is under way and one of its own for each of CLAIM, APPEND, RELEASE
#: and BACK, less the last claims. Where servers are far it begins by so much sooner, so that it ends in time.
TRIPS: Final = 7
#: The least that a part of it gets where those before it took it all.
LEAST_S: Final = 0.05


class Drain:
    """`begin` may be called by any thread, and again: that can only make it shorter."""

    def __init__(
        self,
        engine: Any,
        deliveries: Deliveries,
        *,
        intake: Intake,
        claimer: Claimer,
        publisher: Publisher,
        finisher: Finisher,
        acker: Acker,
        housekeeper: Housekeeper,
    ) -> None:
        self._engine = engine
        self._deliveries = deliveries
        self._changed = deliveries.changed
        self._intake = intake
        self._claimer = claimer
        self._publisher = publisher
        self._finisher = finisher
        self._acker = acker
        self._housekeeper = housekeeper
        self._until: float | None = None
        self._status = os.EX_OK
        self._suspects: Collection[str] | None = frozenset()
        self.over = threading.Event()
        """All is handed back: the main thread may leave."""

    def begin(
        self, seconds: float, why: str, status: int = os.EX_OK, suspects: Collection[str] | None = frozenset()
    ) -> None:
        """`status`: the process's exit status, where that is to be another than 0. `suspects`: deliveries that may be
        to blame for it, None for all that are held: a death is counted against their tasks, as if the process had been
        lost with them. Whose next token comes elsewhere is none any more."""
        until = time.monotonic() + seconds
        with self._changed:
            first = self._until is None
            if status and not self._status:
                self._status, self._suspects = status, suspects
            elif self._until is not None and self._until <= until:
                return
            self._until = until if self._until is None else min(until, self._until)
            self._changed.notify_all()
        held = len(self._deliveries)
        if seconds > 0:
            logger.info("%s: fetching no more; %d tasks may go on for %.1f s", why, held, seconds)
        else:
            logger.warning("%s: handing %d tasks back now", why, held)
        if first:
            threading.Thread(target=self._run, name="penstock-drain", daemon=True).start()

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._intake.stop()
        self._housekeeper.renew_soon()  # its pool's workers are without this one now
        with self._changed:
            ahead = min(TRIPS * self._housekeeper.lease.round_trip, max(0.0, self._until_now()) / 2)
            while self._deliveries.held and (left := self._until_now() - ahead) > 0:
                self._changed.wait(left)
            # What is left of the drain time: nothing where a second signal came.
            spare = min(ahead, max(0.0, self._until_now()))
        # Whatever hangs: with all stacks shown, and without the help of any thread of ours.
        faulthandler.dump_traceback_later(spare + EXIT_S, exit=True, file=2)  # Celery has taken sys.stderr
        end = time.monotonic() + spare + HAND_BACK_S
        whole = self._hand_back(end)
        closed = _within(self._engine.close, end)
        self._acker.stop()
        self._housekeeper.stop()
        if not whole:
            logger.error("Store or broker do not answer: %d tasks return when the lease lapses", len(self._deliveries))
            os._exit(self._status or 1)
        if self._status or not closed:  # a thread that computes must not be met by the interpreter's end
            os._exit(self._status)
        self.over.set()
        time.sleep(max(0.0, end + EXIT_S - HAND_BACK_S - time.monotonic()) / 2)
        os._exit(os.EX_OK)  # the main thread waits for a broker that does not answer, say

    def _until_now(self) -> float:
        assert self._until is not None
        return self._until - time.monotonic()

    def _hand_back(self, end: float) -> bool:
        """Hand all back; True if store and broker took it. The lease may be left to lapse: nothing is under it."""
        left = list(self._deliveries.held.values())
        if left:
            logger.warning("The drain is over: handing %d tasks back", len(left))
        for delivery in left:
            self._engine.abort(delivery.uuid)
        stopped = self._claimer.stop(_left(end)) and self._publisher.stop(_left(end))
        # The last first: each goes to the front of its list.
        for delivery in reversed(list(self._deliveries.held.values())):
            if self._suspects is not None and delivery.uuid not in self._suspects:
                self._back(delivery)
        stopped = self._finisher.stop(_left(end)) and stopped
        if not (self._acker.flush(_left(end)) and stopped):
            return False
        # What was kept back, and no lease over it, returns to the front by REAP; its next CLAIM finds an owner dead.
        if not _within(self._give_up_lease, end):
            logger.warning("All is handed back; the lease is left to lapse: store or broker answer slowly")
        return True

    def _back(self, delivery: Delivery) -> None:
        """RELEASE also what we do not know to be claimed: the answer to its CLAIM may be on its way."""
        self._deliveries.running.pop(delivery.uuid, None)
        delivery.ended = True
        self._finisher.release(delivery, why="drained")

    def _give_up_lease(self) -> None:
        """Also keeps what this worker measured, as the last thing: it can be missed."""
        self._housekeeper.lease.give_up(self._deliveries.life, self._finisher.redis, self._acker.broker)
        self._housekeeper.keeper.keep(self._finisher.redis)


def _left(end: float) -> float:
    return max(LEAST_S, end - time.monotonic())


def _within(action: Callable[[], None], end: float) -> bool:
    """Run it on a thread; True if it ended in time, else it goes on."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(_left(end))
    return not thread.is_alive()
