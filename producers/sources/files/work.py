"""Takes a place's open objects forward, whoever opened them.

    open_entries ─▶ no batch yet: intake ─▶ (the sweeper runs the batch) ─▶ it has ended: delivery

One process works on an object at a time, by a lease in the store, so that no gigabytes are copied twice. Two at once
are harmless: all that is made has an id or a name that the entry gives.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.connection.trouble import error_text, trouble
from producers.errors import shown
from producers.sources.files.delivery import Delivery
from producers.sources.files.intake import Intake, input_file
from producers.sources.files.place import Place, Replaced, Stopped
from producers.sources.files.settings import InboxSettings
from producers.sources.source import Context, ended
from producers.store import batches, files, inbox
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.inbox import Entry, InboxObject

log = logging.getLogger(__name__)

#: Time (s) between two looks at what is open.
EVERY_S: Final = 1.0
#: Objects of a source that are copied at a time.
STEPS: Final = 2
#: Time (s) after which a process that works on an object counts as dead.
LEASE_S: Final = 15.0
RENEWALS: Final = 3
#: Longest pause (s) before an object that failed is tried again. It doubles from EVERY_S on.
LONGEST_PAUSE_S: Final = 60.0


class Work:
    """One process's part in a place's objects."""

    def __init__(self, name: str, context: Context, place: Place, blobs: Blobs, settings: InboxSettings) -> None:
        self._name = name
        self._process = context.process
        self._store = context.client.store
        self._place = place
        self._blobs = blobs
        self._intake = Intake(self._store, blobs, place, settings)
        self._delivery = Delivery(self._store, blobs, place)
        self._steps = asyncio.Semaphore(STEPS)
        self._news = asyncio.Event()
        self._retries: dict[str, tuple[float, float]] = {}
        """Batch id -> when it is tried again, and the pause before that."""
        self._held: dict[str, str] = {}
        """Batch id -> what of the servers holds it up."""

    @property
    def trouble(self) -> str:
        """The reasons that hold open objects up; empty once all go on, here or in another process."""
        return next(reversed(self._held.values()), "")

    async def open(self, found: InboxObject) -> None:
        """Take up an object, if it is not known. Raises redis.exceptions.RedisError and OSError."""
        if refusal := self._place.refusal(found.name):
            warn_throttled(log, "source %s: %s is left where it is: %s", self._name, shown(found.name), refusal)
            return
        entry = inbox.new_entry(self._place.name, found, int(time.time() * 1000))
        new, _ = await arun(self._store, inbox.take(self._place.name, entry))
        if new:
            self._news.set()
            log.info("source %s: %s (%d bytes) is batch %s", self._name, shown(found.name), found.size, entry.id)

    async def run(self, every_s: float = EVERY_S) -> None:
        """Take all open objects forward, until cancelled. Raises redis.exceptions.RedisError and OSError."""
        running: dict[str, asyncio.Task[None]] = {}
        stopped = threading.Event()
        try:
            while True:
                self._news.clear()
                found = await inbox.open_entries(self._store, self._place.name)
                self._forget_all_but({entry.id for entry, _ in found})
                for entry, status in found:
                    waits = status is not None and status not in batches.ENDED
                    if not waits and entry.id not in running and self._is_due(entry):
                        task = running[entry.id] = asyncio.create_task(self._one(entry, stopped.is_set), name=entry.id)
                        task.add_done_callback(lambda over: running.pop(over.get_name()))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), every_s)
        finally:
            stopped.set()  # threads go on when their tasks are cancelled
            await ended(list(running.values()))

    def _forget_all_but(self, open_now: set[str]) -> None:
        """Another process has finished the others."""
        for kept in (self._retries, self._held):
            for batch_id in kept.keys() - open_now:
                del kept[batch_id]

    def _is_due(self, entry: Entry) -> bool:
        return time.monotonic() >= self._retries.get(entry.id, (0.0, 0.0))[0]

    async def _one(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        try:
            async with self._steps:
                await self.take_forward(entry, stopped)
        except FAILURES as error:
            self._later(entry, error_text(error), error)
        except BlobNotFound as error:
            self._later(entry, f"{error} in --files-dir, which all processes share", error)
        except Exception as error:  # noqa: BLE001 - one object must not stop the others
            warn_throttled(log, "an object of source %s failed here:\n%s", self._name, traceback.format_exc())
            self._later(entry, f"{type(error).__name__}: {error}", error)
        else:
            self._retries.pop(entry.id, None)
            self._held.pop(entry.id, None)

    def _later(self, entry: Entry, why: str, error: Exception) -> None:
        pause = min(2 * self._retries.get(entry.id, (0.0, EVERY_S / 2))[1], LONGEST_PAUSE_S)
        self._retries[entry.id] = time.monotonic() + pause, pause
        name = shown(entry.object.name)
        if trouble(error) is not None:  # else it is this object's alone
            self._held[entry.id] = f"{name} is held up: {why}"
        warn_throttled(log, "source %s: %s is held up, trying again: %s", self._name, name, why)

    async def take_forward(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        """Take the object forward while no other process does, unless one has finished it meanwhile."""
        if await self._hold(entry) != 0:
            return
        holding = asyncio.create_task(self._keep(entry))
        try:
            if await inbox.is_open(self._store, self._place.name, entry):
                await self._step(entry, stopped)
        except Stopped:
            pass
        except Replaced:
            log.warning(
                "source %s: %s was replaced or removed before it was read", self._name, shown(entry.object.name)
            )
            await files.remove(self._store, self._blobs, input_file(entry))
            await arun(self._store, inbox.done(self._place.name, entry, forget=True))
        finally:
            holding.cancel()
            with suppress(*FAILURES):
                await arun(self._store, inbox.let_go(entry, self._process))

    async def _step(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        batch = await batches.read(self._store, entry.id)
        if batch is None:
            await self._intake.take_in(entry, stopped)
        elif batch.ended:
            await self._delivery.deliver(entry, batch, stopped)
            log.info("source %s: %s is %s, and in the outbox", self._name, shown(entry.object.name), batch.status)

    async def _hold(self, entry: Entry) -> int:
        return int(await arun(self._store, inbox.hold(entry, self._process, int(LEASE_S * 1000))))

    async def _keep(self, entry: Entry) -> None:
        while True:
            await asyncio.sleep(LEASE_S / RENEWALS)
            with suppress(*FAILURES):
                await self._hold(entry)
