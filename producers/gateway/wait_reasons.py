"""Tells callers who wait what their task waits for, in the words of `explain`.

    stream silent for 4 s ─▶ the task's record, a few fields ─▶ the fleet, one reading for all who wait ─▶ reasons

A reading of the fleet takes six round trips and is kept for FRESH_S, so thousands who wait cost one every few seconds,
and each of them one call. Its place in the queue, which takes more, is told by `/v1/tasks/{id}/explain` alone.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final

from producers.admin.explain import Reason, reasons
from producers.admin.fleet import Fleet, read_fleet
from producers.admin.observation import observed_in
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.storage import read_storage
from producers.contract import keys
from producers.contract.record import Record
from producers.errors import BrokenRecord

#: Time (s) for which a reading of the fleet counts; the longest that one may take; the longest to wait for a text.
FRESH_S, READ_S, LIMIT_S = 3.0, 3.0, 0.8
#: Most characters of the text.
LONGEST: Final = 500
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
#: The record's fields that tell what keeps a task.
FIELDS: Final = (
    *("status", "model", "version", "queue", "tier", "tokens", "tenant", "fingerprint", "owner", "claim", "first"),
    *("adapter", "chunks"),
)


class WaitReasons:
    """One gateway's texts for those who wait."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._reading: asyncio.Task[tuple[Fleet, float] | None] | None = None
        self._read_at = float("-inf")

    async def text(self, task_id: str, *, whole: bool) -> str:
        """The reason why a task waits, as one line of printable ASCII; empty if it runs, has ended, or nobody can tell
        in time.

        `whole`: else only the reasons' names, for callers who may not read tasks.
        """
        try:
            async with asyncio.timeout(LIMIT_S):
                values = await self._client.store.hmget(keys.task(task_id), FIELDS)
                fields = {name: value for name, value in zip(FIELDS, values, strict=True) if value is not None}
                record = Record.parse(task_id, fields)
                begun = record.chunks and record.status == "in_progress"
                if not fields or record.final or "first" in fields or begun:
                    return ""
                read = await self.fleet()
        except (TimeoutError, BrokenRecord, *FAILURES):
            return ""
        if read is None:
            return ""
        fleet, used = read
        why = reasons(observed_in(fleet, record, used=used))
        if not why:
            return "" if record.status == "in_progress" else "its turn"
        return _line(why, whole)

    async def fleet(self) -> tuple[Fleet, float] | None:
        """The fleet, up to FRESH_S old, and the share of the store's memory that is in use: one reading for all who ask
        meanwhile. None if it cannot be read."""
        now = time.monotonic()
        if self._reading is None or (self._reading.done() and now - self._read_at > FRESH_S):
            self._reading, self._read_at = asyncio.create_task(self._read()), now
        return await asyncio.shield(self._reading)

    async def _read(self) -> tuple[Fleet, float] | None:
        try:
            async with asyncio.timeout(READ_S):
                fleet = await read_fleet(self._client.store, self._client.broker)
                return fleet, (await read_storage(self._client.store)).ratio
        except (TimeoutError, *FAILURES):
            return None


def _line(why: list[Reason], whole: bool) -> str:
    text = "; ".join(reason.message for reason in why) if whole else ", ".join(reason.name for reason in why)
    text = " ".join(text.split()).encode("ascii", "backslashreplace").decode()  # a worker's trouble may be any text
    text = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
