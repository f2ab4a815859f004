"""Leases in the store, on its clock: of the process that leads, and of readers who wait.

**Leaders.** Elects one leading sweeper, source or autoscaler, by a lease.

    acquire: LEAD until nobody else does -> keep: LEAD three times a lease, until another does or the store is away
    resign: at a good end, so that nobody has to wait for the lease to lapse

For a moment two processes may think that they lead, after one was stopped or cut off and goes on. Nothing depends on a
single leader. A sweeper acts by scripts, each of which looks at the record itself; what the sweeper has read before may
be old. The script that stores an autoscaler's decisions refuses those of one that no longer leads.

**Readers.** Reader leases: a task whose caller waits on a connection is cancelled once its reader's lease has lapsed.

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
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, Steps, once, persistently
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, arun, script, text
from producers.connection.trouble import error_text, fault, sleep_unless_cancelled
from producers.contract import keys
from producers.store import epoch, protocol
from producers.store.protocol import PACKAGE, READER_LEASE_S

log = logging.getLogger(__name__)

#: Silence (s) of a leader after which another one leads.
LEASE_S: Final = 5.0
RENEWALS: Final = 3


def lead(name: str, lease_ms: int, key: str = keys.SWEEPER, epoch: str = "") -> Call:
    """LEAD: take or renew the lead. Answers 0, the remaining ms of another leader's lease, or -1 in another epoch than
    the caller's (`producers.store.epoch`)."""
    return Call(script(PACKAGE, "lead"), (key,), (name, lease_ms, epoch))


def resign(name: str, key: str = keys.SWEEPER) -> Call:
    """RESIGN: give the lead up. Answers 1, or 0 if this process did not lead."""
    return Call(script(PACKAGE, "resign"), (key,), (name,))


class Leadership:
    """One process's part in the election. `name`: unique to the process; `key`: of the lease, whose `role` is meant."""

    def __init__(
        self, client: AsyncClient, name: str, lease_s: float = LEASE_S, key: str = keys.SWEEPER, role: str = "sweeper"
    ) -> None:
        self._client = client
        self.name = name
        self.lease_s = lease_s
        self._key, self._role = key, role
        self._until = 0.0
        self._epoch: str | None = None
        """The store's epoch at this process's first renewal."""
        #: When the store last answered (by `time.monotonic`).
        self.heard_at = time.monotonic()
        #: Why it did not, when it last failed.
        self.fault = "the store does not answer"

    @property
    def leads(self) -> bool:
        """Whether the lease holds for sure, by this machine's clock: also right after the process was stopped."""
        return time.monotonic() < self._until

    async def during(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do the work whenever this process leads, until cancelled; then give the lead up at once.

        The work starts again with each lead, and may end by itself. Its errors end this, too. Raises EpochChanged if
        the store was restored since this process's first renewal.
        """
        try:
            while True:
                await self.acquire()
                await self._while_kept(work())
        finally:
            await self.resign()

    async def _while_kept(self, work: Coroutine[Any, Any, None]) -> None:
        done, kept = asyncio.create_task(work, name=self._role), asyncio.create_task(self.keep(), name="keep leading")
        try:
            await asyncio.wait((done, kept), return_when="FIRST_COMPLETED")
        finally:
            for task in (done, kept):
                task.cancel()
            await asyncio.wait((done, kept))
        for task in (done, kept):
            if not task.cancelled():
                task.result()

    async def acquire(self) -> None:
        """Wait until this process leads."""
        announced = False
        while (remaining_ms := await self._renew()) != 0:
            if remaining_ms is not None and not announced:
                log.info("another %s leads; %s waits", self._role, self.name)
                announced = True
            longest = self.lease_s / RENEWALS
            await sleep_unless_cancelled(longest if remaining_ms is None else min(longest, remaining_ms / 1000 + 0.01))

    async def keep(self) -> None:
        """Renew the lease. Returns when this process no longer leads, or cannot know."""
        while True:
            await sleep_unless_cancelled(self.lease_s / RENEWALS)
            remaining_ms = await self._renew()
            if remaining_ms:
                self._until = 0.0
                log.warning("another %s leads: %s was not heard of for %s s", self._role, self.name, self.lease_s)
                return
            if time.monotonic() > self._until:
                log.warning("%s leads no more: no renewal for %s s, %s", self.name, self.lease_s, self.fault)
                return

    async def resign(self) -> None:
        """Give the lead up at once. If the store is away, the lease lapses."""
        self._until = 0.0
        try:
            async with asyncio.timeout(self.lease_s / RENEWALS):
                await self._client.run(once(resign(self.name, self._key)))
        except FAILURES as error:
            log.info("the lease of the %s is left to lapse: %s", self._role, error_text(error))

    async def _renew(self) -> int | None:
        """Returns 0 if this process leads, the remaining ms of another's lease, or None without an answer."""
        # Measured before the call: our lease ends for us before it ends for the store.
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.lease_s / RENEWALS / 2):
                if self._epoch is None:
                    self._epoch = await epoch.aread(self._client.store)
                call = lead(self.name, int(self.lease_s * 1000), self._key, self._epoch)
                remaining_ms = int(await self._client.run(once(call)))
        except FAILURES as error:
            self.fault = fault("the store", error)
            warn_throttled(log, "cannot ask the store who leads, trying again: %s", error)
            return None
        self.heard_at = time.monotonic()
        if remaining_ms == epoch.OTHER:
            self._until = 0.0
            raise epoch.EpochChanged
        if remaining_ms == 0:
            self._until = began + self.lease_s
        return remaining_ms


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
            await sleep_unless_cancelled(pause)
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
