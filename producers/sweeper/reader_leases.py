"""Reader leases: a task whose caller waits on a connection is cancelled when its reader is heard of no more.

    ReaderLeases (a gateway):  enter, before ADMIT -> renewed for all at once, three times a lease -> leave, at the end
    LapsedReaders (who sweeps: gateways, workers):  lapsed for a while -> UNREAD: cancelled and removed, if still lapsed

The set `penstock:readers` holds task ids by when their lease ends, in server time. It decides only who calls CANCEL,
and when: the protocol is as it is without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, Steps, persistently
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, script, text
from producers.connection.trouble import said
from producers.contract import keys
from producers.store import protocol

log = logging.getLogger(__name__)

#: Seconds after which a reader that was not heard of is gone.
LEASE_S: Final = 15.0
RENEWALS: Final = 3
#: Ids in one call: a script blocks the store.
MANY: Final = 1000
#: A renewal that failed is tried again so soon (s).
RETRY_S: Final = 0.5


def hold(task_ids: Iterable[str], lease_ms: int) -> Call:
    """Answers how many were entered anew."""
    return Call(script(protocol.PACKAGE, "hold"), (keys.READERS,), (lease_ms, *task_ids))


def lapsed() -> Call:
    """Answers `[id, ms, ...]`, see `read_lapsed`."""
    return Call(script(protocol.PACKAGE, "lapsed"), (keys.READERS,), (MANY,))


def read_lapsed(answer: Sequence[Any]) -> dict[str, int]:
    """When the lease of each ended (server ms)."""
    return {text(name): int(float(over)) for name, over in zip(answer[::2], answer[1::2], strict=True)}


def renewed_within(lease_s: float) -> float:
    """Seconds within which whoever lives has renewed a lease, also where the store was away or its clock set."""
    return lease_s / RENEWALS + 2 * RETRY_S


class ReaderLeases:
    """Those of one process. `run` keeps them up."""

    def __init__(self, client: AsyncClient, lease_s: float = LEASE_S, patience_s: float = 4.0) -> None:
        self._client = client
        self._lease_ms = int(lease_s * 1000)
        self._every_s = lease_s / RENEWALS
        self._patience_s = patience_s
        self._held: set[str] = set()

    def __len__(self) -> int:
        return len(self._held)

    async def enter(self, task_ids: Sequence[str]) -> None:
        """To be called before these tasks are submitted. Raises redis.exceptions.RedisError or OSError."""
        await self._client.run(persistently(hold(task_ids, self._lease_ms), self._patience_s))
        self._held.update(task_ids)

    async def leave(self, task_ids: Sequence[str], lapse: Collection[str] = ()) -> None:
        """Their tasks have ended, or were cancelled. Those in `lapse` were not: they are left for a sweeper to cancel.

        What the store does not hear lapses, too.
        """
        self._held.difference_update(task_ids)
        ended = [task_id for task_id in task_ids if task_id not in lapse]
        try:
            if ended:
                async with asyncio.timeout(SILENT_S):
                    await self._client.store.zrem(keys.READERS, *ended)
        except FAILURES as error:
            log.info("reader leases are left to lapse: %s", said(error))

    async def run(self) -> None:
        """Renew until cancelled."""
        pause = self._every_s
        while True:
            await asyncio.sleep(pause)
            held = list(self._held)
            try:
                for start in range(0, len(held), MANY):
                    await self._client.run(persistently(hold(held[start : start + MANY], self._lease_ms), 0.0))
                pause = self._every_s
            except FAILURES as error:
                warn_throttled(log, "cannot renew %d reader leases, trying again: %s", len(held), error)
                pause = min(RETRY_S, self._every_s)


class LapsedReaders:
    """Cancels for those who are gone. One for each process that sweeps: it remembers what it saw, and since when.

    After the store was away for a while, or its clock was set, all leases are over, of living readers too. So one must
    have been found lapsed for as long as a renewal takes, in looks that all came through.
    """

    def __init__(self, lease_s: float = LEASE_S) -> None:
        """`lease_s`: of the gateways."""
        self._wait_s = renewed_within(lease_s)
        # When the lease of each ended (server ms), and when that was first seen (our clock, s).
        self._seen: dict[str, tuple[int, float]] = {}

    @property
    def every_s(self) -> float:
        """How often to look."""
        return self._wait_s / 2

    def sweep(self) -> Steps[int]:
        """How many tasks were cancelled, or had ended before. Raises what the store does."""
        seen, self._seen = self._seen, {}  # unless this comes to its end: then everybody's time begins anew
        found = read_lapsed((yield lapsed()))
        now = time.monotonic()
        lasting: dict[str, tuple[int, float]] = {}
        gone = 0
        for task_id, over in found.items():
            ended, since = seen.get(task_id, (over, now))
            if ended != over:
                since = now
            if now - since < self._wait_s:
                lasting[task_id] = (over, since)
            else:
                gone += int((yield protocol.unread(task_id, over))[0])
        self._seen = lasting
        return gone
