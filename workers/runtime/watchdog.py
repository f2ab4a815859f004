"""Watches what cannot watch itself: the engine's step, the publisher, the event loop.

    a step that does not end       -> its tasks go elsewhere, the process ends (`Runtime.give_up`)
    memory of the GPU that is bad  -> the same, and no task is to blame
    a publisher that is stuck      -> unready: nothing is fetched until the store answers
    an event loop that is stuck    -> unready: nothing is fetched meanwhile, what it was to take goes back
    another model's step that does
    not end, on a shared device    -> unready: nothing is fetched until it is our turn

A thread that hangs in a driver cannot be ended, so that a hung step costs the process: whoever runs it starts it anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

from workers.flow.intake import Intake
from workers.flow.publisher import Publisher
from workers.runtime.gpu_facts import GpuFacts
from workers.state.served import Served

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25
#: The publisher, the event loop and a neighbour on the device are said to be stuck after this long, seconds: longer
#: than a server's restart.
STUCK_S: Final = 15.0


class Watchdog(threading.Thread):
    """`reasons`: why this worker is not ready; empty if it is.

    `give_up` ends the worker with a reason, and the deliveries that may be to blame; `on_change` is called when
    `reasons` have changed."""

    def __init__(
        self,
        served: Served,
        gpu: GpuFacts,
        publisher: Publisher,
        intake: Intake,
        give_up: Callable[[str, Collection[str]], None],
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(name="penstock-watchdog", daemon=True)
        self._engine = served.engine
        self._limit = served.settings.step_limit
        self._gpu = gpu
        self._publisher = publisher
        self._intake = intake
        self._give_up = give_up
        self._on_change = on_change
        self._stuck = STUCK_S
        self._reported: frozenset[str] = frozenset()
        self.reasons: tuple[str, ...] = ()

    def run(self) -> None:
        while True:
            time.sleep(TICK_S)
            self._watch_step()
            self._watch_gpu()
            reasons = {
                "publisher": self._stuck_publisher(),
                "event loop": self._stuck_loop(),
                "turn": self._stuck_neighbour(),
            }
            self._log({name: reason for name, reason in reasons.items() if reason})

    # ---- what it looks at -----------------------------------------------------------------------------------------

    def _watch_step(self) -> None:
        limit = self._limit
        seconds, suspects = self._engine.stepping()
        if limit and seconds > limit:
            self._give_up(
                f"a step has not ended for {seconds:.0f} s (--max-step-seconds {limit:g}) for {len(suspects)} tasks",
                suspects,
            )

    def _watch_gpu(self) -> None:
        """Errors are counted since the driver was loaded, so that the process that comes next begins with this one."""
        before, errors = ((facts or {}).get("ecc_uncorrected") for facts in (self._gpu.first, self._gpu.latest))
        if before is not None and errors is not None and errors > before:
            self._give_up(
                f"the GPU's memory has {errors - before} new errors that it could not correct, and a weight may be "
                "among what they hit. Its tasks go to others; start it again, and reset or replace the GPU if there "
                "are more (nvidia-smi -q -d ECC,ROW_REMAPPER)",
                frozenset(),
            )

    def _stuck_publisher(self) -> str:
        since = self._publisher.busy_since
        waits = 0.0 if since is None else time.monotonic() - since
        return f"tokens have waited for {waits:.0f} s to be published" if waits > self._stuck else ""

    def _stuck_loop(self) -> str:
        now, intake = time.monotonic(), self._intake
        if not intake.attached:
            intake.loop_nudged_at = None
        elif intake.loop_nudged_at is None:
            intake.loop_nudged_at = now
            intake.nudge()
        nudged_at = intake.loop_nudged_at
        stuck = nudged_at is not None and now - nudged_at > self._stuck
        return "Celery's event loop does not answer" if stuck else ""

    def _stuck_neighbour(self) -> str:
        waits = self._engine.turn_due_s
        return f"another model has computed on its device for {waits:.0f} s" if waits > self._stuck else ""

    # ---- what it says ---------------------------------------------------------------------------------------------

    def _log(self, reasons: dict[str, str]) -> None:
        now = frozenset(reasons)
        for name in now - self._reported:
            logger.error("This worker is not ready, and fetches nothing until it is: %s", reasons[name])
        for name in self._reported - now:
            logger.warning("Well again: %s", name)
        self.reasons = tuple(reasons.values())
        if now != self._reported:
            self._reported = now
            self._intake.pause(bool(reasons))
            self._on_change()
