"""Tells when a task ends, to those who get it (`producers.admin.eta`), at a bounded cost to the store.

    GET /v1/tasks/{id} ─▶ the task's last estimate, up to KEPT_S old
                       └▶ the fleet's last reading, the last ends of tasks,
                          the place in the queue ─▶ forecast                               at most PER_S a second

A place in a queue takes the store milliseconds, and callers poll. So a gateway looks for few places a second; what
comes beyond that gets its last estimate, or none. Workers, of which there may be a thousand, are added up once for each
reading of the fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Final

from producers.admin.eta import Eta, KnownGroups, forecast
from producers.admin.fleet import Fleet
from producers.admin.observation import EndedTask, look, read_ended
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.contract.record import Record
from producers.errors import BrokenRecord
from producers.gateway.wait_reasons import WaitReasons

#: Age (s) up to which an estimate is told again; places that are looked for a second; the longest look (s).
KEPT_S, PER_S, LIMIT_S = 2.0, 20.0, 0.5
#: Age (s) up to which the last ends of tasks will do.
ENDED_KEPT_S: Final = 1.0
#: The most tasks whose estimates are remembered.
MAX_TASKS: Final = 1000


class Estimates:
    """One gateway's estimates."""

    def __init__(self, client: AsyncClient, waits: WaitReasons) -> None:
        self._client = client
        self._waits = waits
        #: Task, status -> when it was looked for (monotonic s), and what was forecast.
        self._last: OrderedDict[tuple[str, str], tuple[float, Eta | None]] = OrderedDict()
        #: When the last ends of tasks were read (monotonic s), and they.
        self._ended: tuple[float, list[EndedTask]] = (float("-inf"), [])
        #: The last reading of the fleet, and its workers as they were added up.
        self._groups: tuple[Fleet | None, KnownGroups] = None, {}
        self._allowed, self._at = PER_S, time.monotonic()

    async def eta(self, record: Record) -> Eta | None:
        """A task's end, in seconds from now; None if nobody can tell, or in time."""
        key, now = (record.id, record.fields.get("status", "")), time.monotonic()
        looked_at, eta = self._last.get(key, (float("-inf"), None))
        if now - looked_at > KEPT_S and self._may(now):
            looked_at, eta = now, await self._look(record)
            self._last.pop(key, None)
            self._last[key] = looked_at, eta
            if len(self._last) > MAX_TASKS:
                self._last.popitem(last=False)
        if eta is None:
            return None
        passed = time.monotonic() - looked_at
        return Eta(round(max(0.0, eta.p50_s - passed), 3), round(max(0.0, eta.p90_s - passed), 3))

    def _may(self, now: float) -> bool:
        self._allowed, self._at = min(PER_S, self._allowed + PER_S * (now - self._at)), now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True

    async def _look(self, record: Record) -> Eta | None:
        try:
            async with asyncio.timeout(LIMIT_S):
                reading = await self._waits.fleet()
                if reading is None:
                    return None
                store, broker = self._client.store, self._client.broker
                if time.monotonic() - self._ended[0] > ENDED_KEPT_S:
                    self._ended = time.monotonic(), await read_ended(store)
                observed = await look(store, broker, record, reading[0], self._ended[1])
                if self._groups[0] is not reading[0]:
                    self._groups = reading[0], {}
                return forecast(observed, self._groups[1]).ends
        except (TimeoutError, BrokenRecord, *FAILURES):
            return None
