"""Keeps what this worker measured with its model's version, so that it is known with no worker up.

A store that does not take it, or holds something else there, is no reason to serve less: it is logged and tried again.

| dies after | what stands | who repairs it |
| --- | --- | --- |
| it measured | an older profile, or none | the next worker that serves |
| HSET, before this worker knows | the new profile | nothing to repair: told again, it changes little |
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis import Redis

from producers.connection.log_throttle import warn_throttled
from producers.contract.profile import Profile
from producers.store.fleet.profiles import field, keep
from workers.connect import LOST
from workers.measure.measured import Measured
from workers.state.served import Served

logger = logging.getLogger(__name__)


class Keeper:
    """`profile`: what the worker says of itself now. Any thread."""

    def __init__(self, served: Served, measured: Measured, profile: Callable[[], Profile]) -> None:
        self._name = field(served.pool.model, served.pool.version)
        self._measured = measured
        self._profile = profile
        self._lock = threading.Lock()
        self._evidence = (0, 0)
        self._start: dict[str, float] = {}

    def keep(self, store: Redis) -> None:
        """Merge it into the kept profile. Raises nothing."""
        with self._lock:
            evidence, seen = self._measured.evidence, self._profile()
            fresh, started = evidence != self._evidence, seen.cold_start != self._start and "total" in seen.cold_start
            try:
                if keep(store, self._name, seen, fresh=fresh, started=started):
                    self._evidence = evidence
                    self._start = seen.cold_start if started else self._start
            except LOST as exc:
                warn_throttled(logger, "What this worker measured is not kept, trying again: %s", exc)
