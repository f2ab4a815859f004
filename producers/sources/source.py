"""Sources: each takes messages or files from one origin and makes tasks or batches of them.

`Source` and `SourceSettings` are the interface. `Sources` runs all sources of a process side by side: one that fails is
run again after a pause, and holds up no other. `Outcomes` counts what became of what they took, for `/metrics`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict
from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.connection.trouble import error_text, sleep_unless_cancelled
from producers.errors import PenstockError, shown
from producers.store.measurements import SOURCE_OUTCOMES, measure_items

log = logging.getLogger(__name__)

#: Pause (s) before a source is run again. It doubles with each failure that follows soon.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
#: Time (s) after which a source that runs has come over its last failure.
WELL_S: Final = 5.0
#: Pause (s) between two calls that send outcomes.
SEND_S: Final = 1.0

Outcome = Literal["done", "refused", "missed"]


class Outcomes:
    """Counts of what became of messages, files and times, which are sent to the store each second.

    What was not acknowledged is sent again as it was, under the same number, so a lost reply counts nothing twice.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._sent: Mapping[tuple[str, str], int] = {}
        self._sequence = 0

    def begin(self, source: str) -> None:
        """Let a source's counts begin at 0, so that its first outcome is an increase."""
        self._counts.update(dict.fromkeys(((source, outcome) for outcome in SOURCE_OUTCOMES), 0))

    def add(self, source: str, outcome: Outcome, count: int = 1) -> None:
        self._counts[source, outcome] += count

    async def run(self, store: Redis, process: str) -> None:
        """Send until cancelled, then once more. `process`: a name that no other process has."""
        try:
            while True:
                await self.send(store, process)
                await sleep_unless_cancelled(SEND_S)
        finally:
            await self.send(store, process)

    async def send(self, store: Redis, process: str) -> None:
        """Add to the store what has come. A failure is logged, and what it was about is sent again by the next call."""
        try:
            async with asyncio.timeout(SILENT_S):
                while self._sent or self._counts:
                    if not self._sent:
                        self._sent, self._counts, self._sequence = self._counts, Counter(), self._sequence + 1
                    await arun(store, measure_items(process, str(self._sequence), self._sent))
                    self._sent = {}
        except FAILURES as error:
            warn_throttled(log, "what became of sources' messages and files is not counted, trying again: %s", error)


@dataclass(frozen=True, slots=True)
class Context:
    """A source's surroundings, which its process gives it. `process`: a name that no other process has."""

    client: AsyncClient
    store_url: str
    """For connections that wait: those of `client` are few, and all sources share them."""
    process: str
    files_dir: str
    """The folder, or the URL of a bucket, for files' content: that of gateways and sweepers."""
    outcomes: Outcomes = field(default_factory=Outcomes)


class Source(ABC):
    """One table of the configuration, at work. `name`: that of the table."""

    name: str

    @abstractmethod
    async def run(self) -> None:
        """Take messages or files until cancelled; then give the unfinished ones back, and raise the cancellation.

        After any other error it is run again after a pause: `run` must then find again what was lost.
        """

    @abstractmethod
    def unready(self) -> list[str]:
        """Returns the reasons why it takes nothing now; empty while it takes messages or files."""


class SourceSettings(BaseModel, ABC):
    """A table of the configuration, checked. A type's settings add their own fields.

    A field's description completes "it must be ..." in the message that refuses it.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    type: str

    @abstractmethod
    def source(self, name: str, context: Context) -> Source:
        """Make the source. It connects to nothing yet. Raises ValueError for errors that settings alone cannot show."""


def fitting(fits: Callable[[Any], bool], form: str) -> AfterValidator:
    """Refuses a setting that does not fit. `form`: describes the settings that do."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"it is {shown(value)}; it must be {form}")
        return value

    return AfterValidator(check)


async def together(*parts: Coroutine[Any, Any, None]) -> None:
    """Run parts of a source side by side. When one fails, the others are cancelled, and its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await ended(tasks)
    for task in done:
        task.result()


async def ended(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until all have given back their messages. If the caller is cancelled meanwhile, it still
    waits: the process may end right after."""
    for task in tasks:
        task.cancel()
    cancellation: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as cancelled:
            cancellation = cancelled
    if cancellation is not None:
        raise cancellation


def as_tuple(value: Any) -> Any:
    """Turns TOML's lists into the tuples that frozen settings hold."""
    return tuple(value) if isinstance(value, list) else value


class _Kept:
    """One source, and its trouble."""

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
            await sleep_unless_cancelled(pause * random.uniform(0.8, 1.2))  # noqa: S311 - keeps processes apart

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
        """Returns the reasons why sources take nothing now; empty while all take messages or files."""
        draining = ["it drains"] if self._stopping else []
        return draining + [reason for kept in self._kept for reason in kept.unready()]

    async def run(self) -> None:
        """Run all until cancelled; then wait until each has given its unfinished work back."""
        tasks = [asyncio.create_task(kept.run()) for kept in self._kept]
        try:
            await asyncio.gather(*tasks)
        finally:
            self._stopping = True
            await ended(tasks)
