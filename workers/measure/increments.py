"""What this worker adds to its model's counters and histograms in the store (`producers.store.measurements`).

    engine's thread: a step ─┐
    publisher: token gaps ───┼▶ Tally ─ housekeeper, each second: send ─▶ MEASURE
    engine's statistics ─────┘

Increments that were sent and not acknowledged are sent again as they were, under the same number, before any others: so
a lost reply counts nothing twice, and whatever comes meanwhile waits in constant memory.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from typing import Any, Final

from redis import Redis

from engine.plan import StepWork
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run
from producers.contract import keys
from producers.store.measurements import (
    ENGINE_COUNTERS,
    INTER_TOKEN,
    STEP,
    STEP_SEQUENCES,
    STEP_TOKENS,
    Tally,
    measure,
)
from workers.connect import LOST

#: Increments are sent this often (s), if there are any.
SEND_S: Final = 1.0
logger = logging.getLogger(__name__)


class Increments:
    """`model`: the name that tasks ask for; `engine`: its statistics are counted on from zero. Any thread."""

    def __init__(self, model: str, engine: Any) -> None:
        self._model = model
        self._engine = engine
        self._source = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._sending = threading.Lock()
        self._sequence = 0
        self._unacknowledged: Tally | None = None
        self._statistics = dict.fromkeys((statistic for *_, statistic in ENGINE_COUNTERS), 0)

    def on_step(self, work: StepWork) -> None:
        """Enter an engine's step."""
        with self._lock:
            self._tally.observe(STEP, work.seconds)
            self._tally.observe(STEP_SEQUENCES, work.decodes + work.prompts)
            self._tally.observe(STEP_TOKENS, work.tokens)

    def on_gaps(self, gaps: Mapping[tuple[str, float], int]) -> None:
        """Enter gaps between tokens. `gaps`: (tier, seconds) -> number."""
        with self._lock:
            for (tier, seconds), count in gaps.items():
                self._tally.observe(INTER_TOKEN, seconds, tier if tier in keys.TIERS else "default", count)

    def send(self, store: Redis) -> None:
        """Add what has come to the store. Raises nothing: what is not acknowledged is sent again next time."""
        with self._sending:
            try:
                if self._unacknowledged is not None:
                    self._call(store, self._unacknowledged)
                self._add_statistics()
                with self._lock:
                    tally, self._tally = self._tally, Tally()
                if tally:
                    self._sequence, self._unacknowledged = self._sequence + 1, tally
                    self._call(store, tally)
            except LOST as exc:
                warn_throttled(logger, "What this worker measured is not added to the metrics, trying again: %s", exc)

    def _call(self, store: Redis, tally: Tally) -> None:
        run(store, measure(self._source, str(self._sequence), {self._model: tally}))
        self._unacknowledged = None

    def _add_statistics(self) -> None:
        statistics = self._engine.stats()
        with self._lock:
            for counter, _, name in ENGINE_COUNTERS:
                value = getattr(statistics, name)
                self._tally.add(counter, max(0, value - self._statistics[name]))
                self._statistics[name] = value
