"""Elects one leading sweeper, source or autoscaler, by a lease in the store, on the store's clock.

    acquire: LEAD until nobody else does -> keep: LEAD three times a lease, until another does or the store is away
    resign: at a good end, so that nobody has to wait for the lease to lapse

For a moment two processes may think that they lead, after one was stopped or cut off and goes on. Nothing depends on a
single leader. A sweeper acts by scripts, each of which looks at the record itself; what the sweeper has read before may
be old. The script that stores an autoscaler's decisions refuses those of one that no longer leads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, once
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, script
from producers.connection.trouble import error_text, fault
from producers.contract import keys
from producers.store import epoch
from producers.store.protocol import PACKAGE

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
            pause = self.lease_s / RENEWALS
            await asyncio.sleep(pause if remaining_ms is None else min(pause, remaining_ms / 1000 + 0.01))

    async def keep(self) -> None:
        """Renew the lease. Returns when this process no longer leads, or cannot know."""
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS)
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
