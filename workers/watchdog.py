"""Watches what cannot watch itself: the engine's step, the publisher, the event loop.

    a step that does not end    -> unready, its tasks go elsewhere, the process ends (`Runtime.give_up`)
    a publisher that is stuck   -> unready; it goes on when the store answers
    an event loop that is stuck -> unready, nothing is fetched meanwhile, what it was to take goes back

A thread that hangs in a driver cannot be ended, so that a hung step costs the process: whoever runs it starts it anew.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from workers.runtime import Runtime

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
#: The publisher and the event loop are said to be stuck after this long, seconds: longer than a server's restart.
STUCK_S: Final = 15.0
#: So many sequences with NaN in this many seconds, and the model is taken to be broken.
NOT_FINITE: Final = 3
NOT_FINITE_S: Final = 60.0


class Watchdog(threading.Thread):
    """`reasons`: why this worker is not ready, in words; empty where it is."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(name="penstock-watchdog", daemon=True)
        self._runtime = runtime
        self._stuck = STUCK_S
        self._stopped = threading.Event()
        self._asked: float | None = None
        self._said: frozenset[str] = frozenset()
        self._spoiled = (0, 0.0)
        self._ecc: int | None = None
        self.loop_stuck = False
        self.reasons: tuple[str, ...] = ()

    def stop(self) -> None:
        self._stopped.set()

    def loop_answers(self) -> None:
        """The event loop, whenever it has taken what came."""
        self._asked = None

    def run(self) -> None:
        while not self._stopped.wait(TICK_S):
            self._watch_step()
            found = {
                "publisher": self._publisher(),
                "event loop": self._event_loop(),
                "model": self._model(),
                "gpu": self._gpu(),
            }
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
        if stuck != self.loop_stuck:
            self.loop_stuck = stuck
            self._runtime.intake.pause(stuck)
        return "Celery's event loop does not answer: nothing is fetched" if stuck else ""

    def _model(self) -> str:
        """A request alone may bring NaN about; one after the other, it is the weights, or the memory they are in."""
        count, now = self._runtime.engine.stats().not_finite, time.monotonic()
        before, since = self._spoiled
        if now - since > NOT_FINITE_S:
            before, since = self._spoiled = (count, now)
        return "the model's logits are NaN again and again" if count - before >= NOT_FINITE else ""

    def _gpu(self) -> str:
        errors = (self._runtime.gpu.latest or {}).get("ecc_uncorrected")
        if errors is None:
            return ""
        if self._ecc is None:
            self._ecc = errors
        return "the GPU's memory has errors that it could not correct" if errors > self._ecc else ""

    # ---- what it says ---------------------------------------------------------------------------------------------

    def _tell(self, found: dict[str, str]) -> None:
        now = frozenset(found)
        for name in now - self._said:
            logger.error("This worker is not ready: %s", found[name])
        for name in self._said - now:
            logger.warning("Well again: %s", name)
        self.reasons = tuple(found.values())
        if now != self._said:
            self._said = now
            self._runtime.housekeeper.renew_soon()
