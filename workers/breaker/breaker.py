"""The state of a worker's breaker: closed, asking, open, half open. No I/O; docs/how/breaker.md has the whole.

publisher     failed, completed ─▶ asking, or closed again
housekeeper   open (an outlier), refused, on_idle ─▶ open, closed
clock         the probe, when it is due; the engine's thread has its answer ─▶ half open, or open for longer
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final

from engine.errors import NOT_FINITE, EngineError
from workers.breaker.figures import Figures, Slowness, Window, judge, slowness
from workers.state.clock import Clock

logger = logging.getLogger(__name__)

#: Tasks in a row that the engine fails before a probe tells whether it is to blame.
IN_A_ROW: Final = 3
#: Seconds after a probe that passed in which failures in a row are the requests'.
TRUSTED_S: Final = 10.0
#: Seconds from an opening to its probe: the first, and the most that they grow to.
FIRST_S = 10.0
MOST_S: Final = 300.0
#: Openings after which that time grows no more.
LONGEST_STREAK: Final = 6
#: Seconds closed after which an opening counts for less.
FORGET_S: Final = 60.0
#: Seconds half open without a task after which it is closed.
TRIAL_S = 30.0
#: Failed probes in a row after which only a new process may help.
GIVE_UP: Final = 5
#: Steps of a probe by which its speed is judged.
STEPS: Final = 8

SendProbe = Callable[[Callable[[str | None], None]], None]


class State(StrEnum):
    CLOSED = "closed"
    ASKING = "asking"
    """Tasks failed in a row: its engine is probed at once. It fetches nothing meanwhile."""
    OPEN = "open"
    HALF_OPEN = "half_open"
    """It takes one task at a time, until one ends well."""


class Breaker:
    """Thread-safe. `enabled`: whether it may open. `send_probe` sends a probe to the engine and calls back on the
    engine's thread, with the error, or None; it raises EngineError if the engine takes none now. `give_up` ends this
    worker, with a reason."""

    def __init__(
        self,
        window: Window,
        clock: Clock,
        send_probe: SendProbe,
        give_up: Callable[[str], None],
        *,
        enabled: bool = True,
    ) -> None:
        self._enabled = enabled
        self._window = window
        self._clock = clock
        self._send_probe = send_probe
        self._give_up = give_up
        self._lock = threading.RLock()
        self._in_a_row = self._streak = self._failed_probes = self._turn = 0
        self._since = self._closed_at = time.monotonic()
        self._trusted_until = 0.0
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when the state has changed."""
        self.state = State.CLOSED
        self.why = ""
        self.alone = False
        """It fails by itself, whatever its peers do."""
        self.openings = 0
        self.failures = 0
        """Tasks that its engine failed."""
        self.peers: Sequence[Figures] = ()
        """The figures of peers that are not held back, as last read."""

    # ---- how it is ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.state is State.CLOSED

    @property
    def room(self) -> int | None:
        """Deliveries that the worker may hold; None: as many as fit."""
        return {State.CLOSED: None, State.HALF_OPEN: 1}.get(self.state, 0)

    @property
    def reason(self) -> str:
        """The reason why it is not ready; empty while it is closed."""
        return "" if self.closed else f"its breaker is {self.state.replace('_', ' ')}: {self.why}"

    def slowness(self) -> Slowness | None:
        """Its decode steps against its peers'."""
        return slowness(self._window.figures(), self.peers)

    def outlier(self) -> str:
        """The reason why it is an outlier among its peers; empty if it is none, or may not open."""
        return judge(self._window.figures(), self.peers) if self._enabled and self.closed else ""

    def to_dict(self) -> dict[str, Any]:
        """All of it, for `inspect breaker`."""
        slow = self.slowness()
        return {
            "state": self.state,
            "why": self.why,
            "openings": self.openings,
            "engine_failures": self.failures,
            "slowness": slow and round(slow.ratio, 2),
            "peers": len(self.peers),
            "figures": self._window.figures().to_dict(),
        }

    # ---- the publisher's thread -----------------------------------------------------------------------------------

    def failed(self) -> bool:
        """Notes a task that the engine failed by its own fault. Returns whether to give it back, with no try spent."""
        with self._lock:
            self.failures += 1
            self._window.on_end(failed=True)
            if self.state is State.HALF_OPEN:
                self._open("the task that it was given to prove itself failed", alone=self.alone)
            elif self.closed:
                self._in_a_row += 1
                if self._enabled and self._in_a_row >= IN_A_ROW and time.monotonic() >= self._trusted_until:
                    self.alone = True
                    self._become(State.ASKING, f"its engine failed {self._in_a_row} tasks in a row")
                    self._probe_in(0.0)
            return not self.closed

    def completed(self) -> None:
        """Notes a completed task."""
        with self._lock:
            self._window.on_end(failed=False)
            self._in_a_row = 0
            if self.state is State.HALF_OPEN:
                self._close("a task ended well")

    # ---- the housekeeper's thread ---------------------------------------------------------------------------------

    def open(self, why: str) -> None:
        """Opens: it is an outlier, and the share has room for it."""
        with self._lock:
            if self.closed:
                self._open(why, alone=False)

    def refused(self) -> None:
        """Closes: the share has no room for it any more, so that it has to serve."""
        with self._lock:
            if not self.closed:
                self._close("too many of its pool's workers are held back")

    def on_idle(self) -> None:
        """Closes a worker on trial that holds nothing and got no task for long."""
        with self._lock:
            if self.state is State.HALF_OPEN and time.monotonic() - self._since >= TRIAL_S:
                self._close(f"no task came for {TRIAL_S:.0f} s")

    # ---- changes --------------------------------------------------------------------------------------------------

    def _probe_in(self, seconds: float) -> None:
        self._clock.later(seconds, partial(self._probe, self._turn))

    def _probe(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._window.forget()
        try:
            self._send_probe(self._answered)
        except EngineError as exc:
            logger.info("No probe is sent: %s", exc)
            self._probe_in(FIRST_S)

    def _answered(self, error: str | None) -> None:
        """The engine's thread: the probe has ended."""
        with self._lock:
            if self.closed:
                return
            slow = slowness(self._window.figures(1, STEPS), self.peers)
            if error is not None:
                self._probe_failed(error)
            elif self.state is State.ASKING:
                self._trusted_until = time.monotonic() + TRUSTED_S
                self._close("it answers a probe, so that the requests are to blame")
            elif slow is not None and slow.far:
                self._open(f"a probe took {slow.ratio:.1f} times as long as peers would", alone=False)
            else:
                self._failed_probes = 0
                self._become(State.HALF_OPEN, "it takes one task to prove itself")

    def _probe_failed(self, error: str) -> None:
        self._failed_probes += 1
        if error == NOT_FINITE or self._failed_probes >= GIVE_UP:
            self._give_up(f"its engine failed {self._failed_probes} probes in a row: {error}")
        self._open(f"its engine fails a probe: {error}", alone=True)

    def _open(self, why: str, *, alone: bool) -> None:
        if self.state in (State.CLOSED, State.ASKING):
            self.openings += 1
            self._streak = max(0, self._streak - int((time.monotonic() - self._closed_at) / FORGET_S))
        self._streak = min(self._streak + 1, LONGEST_STREAK)
        self.alone = alone
        delay = min(MOST_S, FIRST_S * 2 ** (self._streak - 1))
        self._become(State.OPEN, why)
        self._probe_in(delay)
        logger.error("This worker takes no tasks: %s. A probe in %.0f s", why, delay)

    def _close(self, why: str) -> None:
        self._window.forget()
        self._in_a_row = self._failed_probes = 0
        self.alone = False
        self._closed_at = time.monotonic()
        self._become(State.CLOSED, "")
        logger.warning("This worker takes tasks again: %s", why)

    def _become(self, state: State, why: str) -> None:
        self._since = time.monotonic()
        self._turn += 1
        self.state, self.why = state, why
        self.on_change()
