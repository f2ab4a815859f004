"""Reader leases: a task whose caller waits on a connection is cancelled once its reader's lease has lapsed.

    ReaderLeases (a gateway):  enter, before ADMIT -> renewed for all at once, three times a lease -> leave, at the end
    LapsedReaders (who sweeps: gateways, workers):  lapsed for a while -> UNREAD: cancelled and removed, if still lapsed

The set `penstock:readers` holds task ids by when their lease ends, in server time. It decides only who calls CANCEL,
and when: the protocol is as it is without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, Steps, persistently
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, arun, script, text
from producers.connection.trouble import error_text
from producers.contract import keys
from producers.store import protocol
from producers.store.protocol import READER_LEASE_S

log = logging.getLogger(__name__)

RENEWALS: Final = 3
#: Most ids in one call, since a script blocks the store.
MANY: Final = 1000
#: Pause (s) before a failed renewal is repeated.
RETRY_S: Final = 0.5


def hold(task_ids: Iterable[str], lease_ms: int) -> Call:
    """HOLD: take or renew reader leases. Answers the number of new ones."""
    return Call(script(protocol.PACKAGE, "hold"), (keys.READERS,), (lease_ms, *task_ids))


def lapsed() -> Call:
    """LAPSED: list lapsed leases. Answers `[id, ms, ...]`, see `read_lapsed`."""
    return Call(script(protocol.PACKAGE, "lapsed"), (keys.READERS,), (MANY,))


def read_lapsed(answer: Sequence[Any]) -> dict[str, int]:
    """Task id -> end of its lapsed lease (server ms)."""
    return {text(name): int(float(over)) for name, over in zip(answer[::2], answer[1::2], strict=True)}


def renewed_within(lease_s: float) -> float:
    """Time (s) in which a live reader renews its lease, also after an outage or a change of the store's clock."""
    return lease_s / RENEWALS + 2 * RETRY_S


class ReaderLeases:
    """The reader leases of one process. `run` renews them."""

    def __init__(self, client: AsyncClient, lease_s: float = READER_LEASE_S, patience_s: float = 4.0) -> None:
        self._client = client
        self._lease_ms = int(lease_s * 1000)
        self._every_s = lease_s / RENEWALS
        self._patience_s = patience_s
        #: Task id -> its readers in this process: requests with one Idempotency-Key share their tasks.
        self._readers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._readers)

    async def enter(self, task_ids: Sequence[str]) -> None:
        """Take leases for tasks before they are submitted. Raises redis.exceptions.RedisError or OSError."""
        await self._client.run(persistently(hold(task_ids, self._lease_ms), self._patience_s))
        self._readers.update(task_ids)

    async def leave(self, task_ids: Sequence[str], lapse: Collection[str] = ()) -> None:
        """Remove the leases of ended or cancelled tasks. Those in `lapse` stay, and a sweeper cancels their tasks.

        If the store is away, the leases lapse.
        """
        for task_id in task_ids:
            if self._readers[task_id] > 1:
                self._readers[task_id] -= 1
            else:
                self._readers.pop(task_id, None)
        ended = [task_id for task_id in task_ids if task_id not in lapse]
        try:
            if ended:
                async with asyncio.timeout(SILENT_S):
                    await self._client.store.zrem(keys.READERS, *ended)
        except FAILURES as error:
            log.info("reader leases are left to lapse: %s", error_text(error))

    async def run(self) -> None:
        """Renew all leases until cancelled."""
        pause = self._every_s
        while True:
            await asyncio.sleep(pause)
            task_ids = list(self._readers)
            try:
                for start in range(0, len(task_ids), MANY):
                    async with asyncio.timeout(SILENT_S):
                        await arun(self._client.reserved, hold(task_ids[start : start + MANY], self._lease_ms))
                pause = self._every_s
            except FAILURES as error:
                warn_throttled(log, "cannot renew %d reader leases, trying again: %s", len(task_ids), error)
                pause = min(RETRY_S, self._every_s)


class LapsedReaders:
    """Cancels tasks of lost readers. Each sweeping process has one, which remembers lapsed leases.

    After an outage or a change of the store's clock all leases have lapsed, also those of live readers. So a lease must
    stay lapsed for the time of a renewal, in looks that all succeeded.
    """

    def __init__(self, lease_s: float = READER_LEASE_S) -> None:
        """`lease_s`: the gateways' reader lease (s)."""
        self._wait_s = renewed_within(lease_s)
        # Task id -> (end of its lease in server ms, time of first notice on our clock in s).
        self._lapsed: dict[str, tuple[int, float]] = {}

    @property
    def every_s(self) -> float:
        """Interval between sweeps (s)."""
        return self._wait_s / 2

    def sweep(self) -> Steps[int]:
        """Cancel tasks of lost readers. Returns how many were cancelled or had ended. Raises the store's errors."""
        earlier, self._lapsed = self._lapsed, {}  # if this sweep fails, the waiting times begin anew
        lease_ends = read_lapsed((yield lapsed()))
        now = time.monotonic()
        lasting: dict[str, tuple[int, float]] = {}
        gone = 0
        for task_id, over in lease_ends.items():
            ended, since = earlier.get(task_id, (over, now))
            if ended != over:
                since = now
            if now - since < self._wait_s:
                lasting[task_id] = (over, since)
            else:
                gone += int((yield protocol.unread(task_id, over))[0])
        self._lapsed = lasting
        return gone
