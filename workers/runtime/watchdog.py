"""Watches what cannot watch itself: the engine's step, the publisher, the event loop.

    a step that does not end       -> its tasks go elsewhere, the process ends (`Runtime.give_up`)
    memory of the GPU that is bad  -> the same, and no task is to blame
    a publisher that is stuck      -> unready: nothing is fetched until the store answers
    an event loop that is stuck    -> unready: nothing is fetched meanwhile, what it was to take goes back

A thread that hangs in a driver cannot be ended, so that a hung step costs the process: whoever runs it starts it anew.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from workers.runtime.assembly import Runtime

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
#: The publisher and the event loop are said to be stuck after this long, seconds: longer than a server's restart.
STUCK_S: Final = 15.0


class Watchdog(threading.Thread):
    """`reasons`: why this worker is not ready, in words; empty where it is."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(name="penstock-watchdog", daemon=True)
        self._runtime = runtime
        self._stuck = STUCK_S
        self._stopped = threading.Event()
        self._asked: float | None = None
        self._said: frozenset[str] = frozenset()
        self._ecc: int | None = None
        self.reasons: tuple[str, ...] = ()

    def stop(self) -> None:
        self._stopped.set()

    def loop_answers(self) -> None:
        """The event loop, whenever it has taken what came."""
        self._asked = None

    def run(self) -> None:
        while not self._stopped.wait(TICK_S):
            self._watch_step()
            self._watch_gpu()
            found = {"publisher": self._publisher(), "event loop": self._event_loop()}
            self._tell({name: reason for name, reason in found.items() if reason})

    # ---- what it looks at -----------------------------------------------------------------------------------------

    def _watch_step(self) -> None:
        limit = self._runtime.settings.step_limit
        seconds, suspects = self._runtime.engine.stepping()
        if limit and seconds > limit:
            self._runtime.give_up(
                f"a step has not ended for {seconds:.0f} s (--step-limit {limit:g}); it computes {len(suspects)} tasks",
                suspects,
            )

    def _watch_gpu(self) -> None:
        """Errors are counted since the driver was loaded, so that the process that comes next begins with this one."""
        errors = (self._runtime.gpu.latest or {}).get("ecc_uncorrected")
        if errors is None:
            return
        if self._ecc is None:
            self._ecc = errors
        if errors > self._ecc:
            self._runtime.give_up(
                f"the GPU's memory has {errors - self._ecc} new errors that it could not correct, and a weight may be "
                "among what they hit. Its tasks go to others; start it again, and reset or replace the GPU if there "
                "are more (nvidia-smi -q -d ECC,ROW_REMAPPER)",
                frozenset(),
            )

    def _publisher(self) -> str:
        since = self._runtime.publisher.busy_since
        waits = 0.0 if since is None else time.monotonic() - since
        return f"tokens have waited for {waits:.0f} s to be published" if waits > self._stuck else ""

    def _event_loop(self) -> str:
        now = time.monotonic()
        if self._runtime.draining or not self._runtime.intake.attached:
            self._asked = None
        elif self._asked is None:
            self._asked = now
            self._runtime.intake.nudge()
        asked = self._asked
        stuck = asked is not None and now - asked > self._stuck
        return "Celery's event loop does not answer" if stuck else ""

    # ---- what it says ---------------------------------------------------------------------------------------------

    def _tell(self, found: dict[str, str]) -> None:
        now = frozenset(found)
        for name in now - self._said:
            logger.error("This worker is not ready, and fetches nothing until it is: %s", found[name])
        for name in self._said - now:
            logger.warning("Well again: %s", name)
        self.reasons = tuple(found.values())
        if now != self._said:
            self._said = now
            self._runtime.intake.pause(bool(found))
            self._runtime.housekeeper.renew_soon()
