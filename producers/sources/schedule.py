"""The source type `schedule`: at each time of a cron expression it makes one task, or one file of a watched folder.

    lead ─▶ the store's time ─▶ due? ─▶ IDEMPOTENT, made by an id of name and time ─▶ the time is noted ─▶ wait

One process leads; the others wait for its lease to lapse. Two who lead for a moment make the same. Nothing depends on
this machine's clock. Times are unix seconds.

`Cron` computes the times of an expression, in a time zone with its clock changes. A time that a change skips becomes
the first moment after it. In the hour that comes twice, an expression that names its hours fires in the first one; one
whose hours have `*` fires in both.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, Final, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterError, croniter
from pydantic import Field, model_validator

from producers.client.leases import Leadership
from producers.client.operations import stored, submit_as
from producers.client.steps import Read, Steps, once, persistently
from producers.connection.script import seconds
from producers.contract import keys
from producers.contract.task import Task
from producers.errors import InvalidTask, PenstockError, SubmitFailed, shown
from producers.sources.source import Context, Source, SourceSettings
from producers.store import idempotency
from producers.store.protocol import swap

log = logging.getLogger(__name__)

#: Fields of an expression: no seconds, no years.
FIELDS: Final = 5
#: croniter's words for a time that it draws, or takes of a name: neither is the same for all processes.
_DRAWN: Final = re.compile(r"(?:^|[\s,])[rh](?:[\s,/(]|$)", re.IGNORECASE)
#: A firing that is later than this (s) was missed: a change of leaders, or a start, takes less.
LATE_S: Final = 60.0
#: Longest wait (s) until the store's time is looked at again: its clock may be set.
LOOK_S: Final = 20.0
#: Time (s) for which it is known that a firing was made.
KEPT_S: Final = 15 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Cron:
    """An expression and its zone. `jitter`: a firing comes up to so many seconds late, each by its own amount."""

    expression: str
    zone: tzinfo
    name: str = ""
    jitter: int = 0

    @classmethod
    def parse(cls, expression: str, zone: str, name: str = "", jitter: int = 0) -> Cron:
        """Raises ValueError, which says what is wrong."""
        well_formed = expression.startswith("@") or len(expression.split()) == FIELDS
        if not well_formed or _DRAWN.search(expression) or not croniter.is_valid(expression):
            raise ValueError(f"cron is {shown(expression)}; it must be five fields, such as 30 6 * * mon-fri")
        try:
            cron = cls(expression, UTC if zone == "UTC" else ZoneInfo(zone), name, jitter)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"timezone is {shown(zone)}; it must be a zone's name, such as Europe/Berlin") from None
        try:
            first = cron.after(datetime.now(UTC).timestamp())
            gap = cron.after(first) - first
        except CroniterError:
            raise ValueError(f"cron is {shown(expression)}, which never comes") from None
        if jitter >= gap:
            raise ValueError(f"jitter is {jitter} s; it must be less than the time between two firings ({gap} s)")
        return cron

    def after(self, now: float) -> int:
        """The first time that is later than `now`."""
        times = croniter(self.expression, self._local(now))
        while self._is_repeated(time := int(times.get_next(float))):
            pass
        return time

    def before(self, now: float) -> int:
        """The last time that is earlier than `now`."""
        times = croniter(self.expression, self._local(now))
        while self._is_repeated(time := int(times.get_prev(float))):
            pass
        return time

    def last_due(self, now: float) -> int:
        """The last time whose firing has come by `now`."""
        time = self.before(now + 0.001)
        while self.fires_at(time) > now:
            time = self.before(time)
        return time

    def fires_at(self, time: int) -> float:
        """Returns when the firing of a time comes: the same in all processes."""
        drawn = hashlib.sha256(f"{self.name} {time}".encode()).digest()[:4]
        return time + self.jitter * int.from_bytes(drawn) / 2**32

    def _local(self, now: float) -> datetime:
        return datetime.fromtimestamp(now, self.zone)

    def _is_repeated(self, time: int) -> bool:
        """Whether the time lies in the second pass of the hour that comes twice, and the expression names its hours."""
        hours = self.expression.split()[1] if not self.expression.startswith("@") else self.expression
        return "*" not in hours and hours != "@hourly" and self._local(time).fold == 1


def stamp(time: int) -> str:
    """A time as a part of a name: 20261122T030000Z."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=time)).strftime("%Y%m%dT%H%M%SZ")


class ScheduleSettings(SourceSettings):
    """A schedule."""

    type: Literal["schedule"]
    cron: str = Field(description="five fields, such as 30 6 * * mon-fri")
    timezone: str = Field("UTC", description="a time zone's name, such as Europe/Berlin")
    task: dict[str, Any] | None = Field(None, description="a table with the task's fields, as for /v1/tasks")
    batch: str | None = Field(None, description="the path of a file of requests (.jsonl), with folder")
    folder: str | None = Field(None, description="the path of a folder that a source of type folder watches")
    jitter: int = Field(0, ge=0, le=24 * 3600, description="most seconds, from 0 on, that a firing may be put off")
    missed: Literal["skip", "once"] = Field("skip", description='"skip" or "once"')

    @model_validator(mode="after")
    def _whole(self) -> Self:
        Cron.parse(self.cron, self.timezone, jitter=self.jitter)
        if (self.task is None) == (self.batch is None) or (self.batch is None) != (self.folder is None):
            raise ValueError("has to have either task, or batch and folder")
        try:
            if self.task is not None:
                Task.parse(self.task)
        except InvalidTask as error:
            raise ValueError(f"task: {error}") from None
        return self

    def source(self, name: str, context: Context) -> Source:
        return Schedule(name, self, context)


class Schedule(Source):
    """One table of type "schedule"."""

    def __init__(self, name: str, settings: ScheduleSettings, context: Context) -> None:
        self.name, self._settings, self._client = name, settings, context.client
        self._outcomes = context.outcomes
        self._outcomes.begin(name)
        self._cron = Cron.parse(settings.cron, settings.timezone, name, settings.jitter)
        key = keys.source_leader(name)
        self._leadership = Leadership(context.client, context.process, key=key, role=f"schedule {name}")
        self._trouble = ""

    async def run(self) -> None:
        await self._leadership.during(self._lead)

    def unready(self) -> list[str]:
        return [self._trouble] if self._trouble else []

    async def _lead(self) -> None:
        while True:
            now, noted = await self._client.run(self._read())
            await asyncio.sleep(min(LOOK_S, await self.step(now, noted)))

    async def step(self, now: float, noted: int | None) -> float:
        """Fire what is due at `now`, if something is. Returns the time (s) until the next firing.

        `noted`: the last time that was dealt with; None: there was none, and the schedule begins now. Times are the
        store's, in unix seconds. Raises SubmitFailed, redis.exceptions.RedisError or OSError.
        """
        if noted is None:
            await self._client.run(self._note(int(now), None))
            noted = int(now)
        due = self._cron.last_due(now)
        if due > noted:
            late = now - self._cron.fires_at(due)
            if late <= LATE_S or self._settings.missed == "once":
                await self._fire(due)
            else:
                log.warning("schedule %s: %s was missed, %.0f s ago", self.name, stamp(due), late)
                self._outcomes.add(self.name, "missed")
            await self._client.run(self._note(due, noted))
        return max(0.0, self._cron.fires_at(self._cron.after(due)) - now)

    async def _fire(self, time: int) -> None:
        """Make the task or file of a time. A failure is logged, and not retried before the next time."""
        try:
            result = await (self._task(time) if self._settings.task is not None else self._batch(time))
        except SubmitFailed:
            raise
        except (PenstockError, FileNotFoundError, PermissionError) as error:
            self._trouble = f"{stamp(time)} made nothing: {error}"
            self._outcomes.add(self.name, "refused")
            log.error("schedule %s: %s", self.name, self._trouble)
        else:
            self._trouble = ""
            self._outcomes.add(self.name, "done")
            log.info("schedule %s: made %s", self.name, result)

    async def _task(self, time: int) -> str:
        task, task_id = Task.parse(self._settings.task), f"{self.name}-{stamp(time)}"
        client = self._client
        steps = submit_as(
            client.directory, task, self._entry(time), "", task_id, client.patience, kept_s=KEPT_S, withdrawn=True
        )
        return await self._client.run(steps) or task_id

    async def _batch(self, time: int) -> str:
        """Put a copy of the batch's file into the folder's inbox, under a name of its own."""
        assert self._settings.batch is not None
        assert self._settings.folder is not None
        name = f"{self.name}-{stamp(time)}.jsonl"
        entry = await self._client.run(stored(self._entry(time), "", name, self._client.patience, KEPT_S))
        if entry is None or entry.state != "made":
            await asyncio.to_thread(_put, Path(self._settings.batch), Path(self._settings.folder), name)
            await self._client.run(once(idempotency.mark_made(self._entry(time))))
        return name

    def _entry(self, time: int) -> str:
        return keys.idempotency(idempotency.digest(f"schedule {self.name} {time}".encode()))

    def _read(self) -> Steps[tuple[float, int | None]]:
        """Returns the store's time, and the last time that was dealt with."""
        commands = (("TIME",), ("HGET", keys.SCHEDULES, self.name))
        now, noted = yield from persistently(Read(commands), self._client.patience)
        return seconds(now), None if noted is None else int(noted)

    def _note(self, time: int, noted: int | None) -> Steps[None]:
        """Note that a time was dealt with, unless another process has noted a later one meanwhile."""
        before = "" if noted is None else str(noted)
        call = swap(keys.SCHEDULES, self.name, before, str(time))
        yield from persistently(call, self._client.patience)


def _put(file: Path, folder: Path, name: str) -> None:
    """Copy a file into the inbox, whole or not at all, and once, even if it was moved to done. Raises OSError."""
    inbox, done = folder / "inbox", folder / "done"
    if (inbox / name).exists() or (done / name).exists():
        return
    inbox.mkdir(parents=True, exist_ok=True)
    hidden = inbox / f".{name}.{os.getpid()}"
    try:
        shutil.copyfile(file, hidden)
        os.rename(hidden, inbox / name)
    finally:
        hidden.unlink(missing_ok=True)


SETTINGS: Final = ScheduleSettings
