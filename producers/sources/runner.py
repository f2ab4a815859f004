"""Runs sources side by side. One that fails is run again after a pause, and holds up no other."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from typing import Final

from producers.client.steps import FAILURES
from producers.connection.trouble import error_text
from producers.errors import PenstockError
from producers.sources.source import Source, ended

log = logging.getLogger(__name__)

#: Pause (s) before a source is run again. It doubles with each failure that follows soon.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
#: Time (s) after which a source that runs has come over its last failure.
WELL_S: Final = 5.0


class _Kept:
    """One source, and how it does."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._trouble = ""
        self._well_at = 0.0

    def unready(self) -> list[str]:
        if self._trouble and time.monotonic() < self._well_at:
            return [f"{self._source.name}: {self._trouble}"]
        return [f"{self._source.name}: {reason}" for reason in self._source.unready()]

    async def run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            self._well_at = began + WELL_S
            await self._once()
            pause = FIRST_PAUSE_S if time.monotonic() > self._well_at else min(2 * pause, LONGEST_PAUSE_S)
            self._well_at = math.inf
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311 - keeps several processes apart

    async def _once(self) -> None:
        """Run the source until it fails."""
        try:
            await self._source.run()
            self._trouble = "it ended by itself"
        except (*FAILURES, PenstockError) as error:
            self._trouble = error_text(error)
        except Exception as error:
            self._trouble = f"{type(error).__name__}: {error}"
            log.exception("source %s failed here", self._source.name)
        log.warning("source %s: %s; it is run again soon", self._source.name, self._trouble)


class Sources:
    """All sources of a process."""

    given_up = ""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._kept = [_Kept(source) for source in sources]
        self._stopping = False

    def unready(self) -> list[str]:
        """Why some source takes nothing now; empty while all do."""
        draining = ["it drains"] if self._stopping else []
        return draining + [reason for kept in self._kept for reason in kept.unready()]

    async def run(self) -> None:
        """Run all, until cancelled; then wait until each has given back what it took."""
        tasks = [asyncio.create_task(kept.run()) for kept in self._kept]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stopping = True
            await ended(tasks)
