"""A process of clients and readers: `python -m workers.trials.chaos.client`, with its `Settings` in the environment.

    (numbers) -> submit through the gateway, the client library or Celery -> journal
              -> read by stream, by poll or not at all, cancel, leave and come back -> journal

Every event is written to the journal before anything else is done. A restarted process reads its predecessors'
journals, follows the tasks that they did not read to the end, and goes on with the next number. At SIGTERM it submits
no more tasks, reads the open ones to their end, and exits with 0.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from workers.trials.chaos.caller import Caller
from workers.trials.chaos.checker.case import History, Journal, ObservedTask, lines_of
from workers.trials.chaos.load import Load, Manner, quiet
from workers.trials.chaos.senders import Holder, Senders

#: The environment variable with the settings, as JSON: URLs may hold passwords, and everybody sees a command line.
SETTINGS: Final = "PENSTOCK_CHAOS_CLIENT"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one client process.

    `folder`: the journals' folder. `number`: counts processes of this name, from 1. `url`, `broker`, `store`: the
    gateway's and servers' URLs. `first`, `step`: this client takes the task numbers first, first + step, ...
    `open_tasks`: tasks at a time. `variants`: submit only these, each once, with nothing done to them. `holders`: API
    keys, the last one for those variants; without any, the environment's key is sent.
    """

    name: str
    folder: str
    url: str
    broker: str
    store: str
    load: Load
    number: int = 1
    first: int = 0
    step: int = 1
    open_tasks: int = 8
    variants: tuple[int, ...] | None = None
    holders: tuple[Holder, ...] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Settings:
        return TypeAdapter(cls).validate_json(text)


@dataclass(slots=True)
class Client:
    """The work of one client process."""

    settings: Settings
    journal: Journal
    caller: Caller
    stopping: asyncio.Event

    async def run(self, before: History) -> None:
        """Submit and read tasks until it is stopped, or until all `variants` are read."""
        free = asyncio.Semaphore(self.settings.open_tasks)
        going: set[asyncio.Task[None]] = set()

        def begin(work: Awaitable[None]) -> None:
            async def within() -> None:
                try:
                    await work
                finally:
                    free.release()

            task = asyncio.create_task(within())
            going.add(task)
            task.add_done_callback(going.discard)

        for observed, manner in self._unread(before):
            await free.acquire()
            begin(self.caller.follow(observed, manner))
        for manner in self._manners(before):
            await _either(free.acquire(), self.stopping)
            if self.stopping.is_set():
                break
            begin(self.caller.whole(manner, self.settings.load.task(manner.variant)))
        while going:
            done, _ = await asyncio.wait(going, return_when="FIRST_COMPLETED")
            for task in done:
                task.result()

    def _manners(self, before: History) -> Iterator[Manner]:
        if self.settings.variants is not None:
            submitted = {number for is_quiet, number in before.tasks if is_quiet}
            yield from (manner for manner in quiet(self.settings.variants) if manner.number not in submitted)
            return
        number = max(
            (n for is_quiet, n in before.tasks if not is_quiet), default=self.settings.first - self.settings.step
        )
        while True:
            number += self.settings.step
            yield self.settings.load.manner(number)

    def _unread(self, before: History) -> Iterator[tuple[ObservedTask, Manner]]:
        """Tasks that predecessors submitted and did not read to the end."""
        for (is_quiet, number), observed in before.tasks.items():
            if observed.id is None or not observed.accepted or observed.via not in ("http", "redis", "poll"):
                continue
            ended = observed.finals or (observed.entries and "end" in observed.entries[-1][2])
            if not ended:
                manner = (
                    Manner(number, observed.variant, observed.via) if is_quiet else self.settings.load.manner(number)
                )
                yield observed, manner


async def _either(acquiring: Awaitable[object], stopping: asyncio.Event) -> None:
    """Wait until a slot is acquired or the client is stopped."""
    acquired, stopped = asyncio.ensure_future(acquiring), asyncio.ensure_future(stopping.wait())
    await asyncio.wait((acquired, stopped), return_when="FIRST_COMPLETED")
    for waiting in (acquired, stopped):
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


def _before(folder: Path, name: str) -> History:
    """The journals that earlier processes of this name wrote."""
    history = History()
    for path in sorted(folder.glob(f"{name}.*.jsonl")):
        history.extend(lines_of(path))
    return history


async def _main(settings: Settings) -> None:
    stopping = asyncio.Event()
    # Before the journal exists: its presence tells others that SIGTERM is handled.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    folder = Path(settings.folder)
    before = _before(folder, settings.name)
    journal = Journal(folder, settings.name, settings.number)
    async with Senders(settings.url, settings.broker, settings.store, settings.holders) as senders:
        caller = Caller(senders, journal, quiet=settings.variants is not None)
        await Client(settings, journal, caller, stopping).run(before)
    journal.close()


if __name__ == "__main__":
    asyncio.run(_main(Settings.parse(os.environ[SETTINGS])))
