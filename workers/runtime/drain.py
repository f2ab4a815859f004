"""Ends a worker: waits for tasks that end in time, and hands the others back with their tokens.

    begin -> fetch no more -> wait -> the other parts stop, in their order (`Part`) -> exit

It runs on a thread of its own and waits for nobody for longer than it says: a store that hangs, a step that does not
end and an event loop that is stuck change what can be handed back, not when the process is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from workers.flow.deliveries import Deliveries
from workers.state.delivery import Delivery
from workers.state.engine import ServedEngine

logger = logging.getLogger(__name__)

#: Time limits (s): for handing back, and until the process has exited in any case.
HAND_BACK_S: Final = 1.5
EXIT_S: Final = 1.9
#: Round trips that handing back may take: one that is under way and one of its own for each of CLAIM, APPEND, RELEASE
#: and BACK, less the last claims. Where servers are far it begins by so much sooner, so that it ends in time.
TRIPS: Final = 7
#: The least that a part gets if the parts before it took all of the time.
LEAST_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a worker. `start`: None if it runs already, or is no thread. `stop(seconds)`: ends within so long;
    False if something is left undone. None: it runs until the process ends."""

    start: Callable[[], object] | None
    stop: Callable[[float], bool] | None


class Drain:
    """`begin` may be called by any thread, and again: that can only make it shorter.

    `release`: RELEASE and BACK, on the way to the last parts that stop. `round_trip`: to the farther server (s).
    """

    def __init__(
        self,
        engine: ServedEngine,
        deliveries: Deliveries,
        release: Callable[[Delivery], None],
        round_trip: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._deliveries = deliveries
        self._release = release
        self._round_trip = round_trip
        self._changed = deliveries.changed
        self._until: float | None = None
        self._status = os.EX_OK
        self._suspects: Collection[str] | None = frozenset()
        self.parts: Sequence[Part] = ()
        """In the order of their start. They stop from the last to the first: the last, which fetches, when the drain
        begins, the others when its time is over. So the lease ends last. Where another part left something undone, it
        is not given up, but left to lapse."""
        self.over = threading.Event()
        """Set once all is handed back: the main thread may leave."""

    def begin(
        self, seconds: float, why: str, status: int = os.EX_OK, suspects: Collection[str] | None = frozenset()
    ) -> None:
        """`status`: the process's exit status, where that is to be another than 0. `suspects`: deliveries that may be
        to blame for it, None for all that are held: a death is counted against their tasks, as if the process had been
        lost with them. Once another worker publishes a task's next token, that count is forgotten."""
        until = time.monotonic() + seconds
        with self._changed:
            first = self._until is None
            if status and not self._status:
                self._status, self._suspects = status, suspects
            elif self._until is not None and self._until <= until:
                return
            self._until = until if self._until is None else min(until, self._until)
            self._changed.notify_all()
        count = len(self._deliveries)
        if seconds > 0:
            logger.info("%s: fetching no more; %d tasks may go on for %.1f s", why, count, seconds)
        else:
            logger.warning("%s: handing %d tasks back now", why, count)
        if first:
            threading.Thread(target=self._run, name="penstock-drain", daemon=True).start()

    # ---- parts that are no threads --------------------------------------------------------------------------------

    def abort(self, seconds: float) -> bool:
        """Aborts everything in the engine."""
        uuids = list(self._deliveries.by_uuid)
        if uuids:
            logger.warning("The drain is over: handing %d tasks back", len(uuids))
        for uuid in uuids:
            self._engine.abort(uuid)
        return True

    def let_go(self, seconds: float) -> bool:
        """Releases what is left, but for suspects: also what we do not know to be claimed, since the answer to its
        CLAIM may be on its way. The last first: each goes to the front of its list."""
        for delivery in reversed(list(self._deliveries.by_uuid.values())):
            if self._suspects is not None and delivery.uuid not in self._suspects:
                self._deliveries.end(delivery)
                self._release(delivery)
        return True

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lease, *between, fetching = [part.stop for part in self.parts if part.stop is not None]
        fetching(0.0)
        spare = self._wait()
        # Whatever hangs: with all stacks shown, and without the help of any thread of ours.
        faulthandler.dump_traceback_later(spare + EXIT_S, exit=True, file=2)  # Celery has taken sys.stderr
        end = time.monotonic() + spare + HAND_BACK_S
        done = [stop(_remaining(end)) for stop in reversed(between)]  # each stops, whatever the one before left undone
        if not all(done):
            logger.error("Store or broker do not answer: %d tasks return when the lease lapses", len(self._deliveries))
            os._exit(self._status or 1)
        # What was kept back, and no lease over it, returns to the front by REAP; its next CLAIM finds an owner dead.
        lease(_remaining(end))
        # What is broken is not waited for, and a thread that computes must not be met by the interpreter's end.
        if self._status or not within(self._engine.close, _remaining(end)):
            os._exit(self._status)
        self.over.set()
        time.sleep(max(0.0, end + EXIT_S - HAND_BACK_S - time.monotonic()) / 2)
        os._exit(os.EX_OK)  # the main thread waits for a broker that does not answer, say

    def _wait(self) -> float:
        """Waits for tasks that end. Returns the remaining drain time (s): nothing if a second signal came."""
        with self._changed:
            ahead = min(TRIPS * self._round_trip(), max(0.0, self._until_now()) / 2)
            while self._deliveries.by_uuid and (remaining := self._until_now() - ahead) > 0:
                self._changed.wait(remaining)
            return min(ahead, max(0.0, self._until_now()))

    def _until_now(self) -> float:
        assert self._until is not None
        return self._until - time.monotonic()


def _remaining(end: float) -> float:
    return max(LEAST_S, end - time.monotonic())


def within(action: Callable[[], None], seconds: float) -> bool:
    """Runs an action on a thread. True if it ended in time, else it goes on."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
