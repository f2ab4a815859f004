"""Times of a cron expression, in a time zone with its changes of the clock. Times are unix seconds.

A time that a change leaves out is the first moment after it. In the hour that comes twice, an expression that names
its hours means the first one; one whose hours have `*` goes on through both.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import CroniterError, croniter

from producers.errors import shown

#: Fields of an expression: no seconds, no years.
FIELDS: Final = 5
#: croniter's words for a time that it draws, or takes of a name: neither is the same for all processes.
_DRAWN: Final = re.compile(r"(?:^|[\s,])[rh](?:[\s,/(]|$)", re.IGNORECASE)


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
        known = expression.startswith("@") or len(expression.split()) == FIELDS
        if not known or _DRAWN.search(expression) or not croniter.is_valid(expression):
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
        while self._second(found := int(times.get_next(float))):
            pass
        return found

    def before(self, now: float) -> int:
        """The last time that is earlier than `now`."""
        times = croniter(self.expression, self._local(now))
        while self._second(found := int(times.get_prev(float))):
            pass
        return found

    def last_due(self, now: float) -> int:
        """The last time whose firing has come by `now`."""
        time = self.before(now + 0.001)
        while self.fires_at(time) > now:
            time = self.before(time)
        return time

    def fires_at(self, time: int) -> float:
        """When the firing of a time comes: the same in all processes."""
        drawn = hashlib.sha256(f"{self.name} {time}".encode()).digest()[:4]
        return time + self.jitter * int.from_bytes(drawn) / 2**32

    def _local(self, now: float) -> datetime:
        return datetime.fromtimestamp(now, self.zone)

    def _second(self, found: int) -> bool:
        """Whether it lies in the hour that comes twice, for the second time, and is not meant."""
        hours = self.expression.split()[1] if not self.expression.startswith("@") else self.expression
        return "*" not in hours and hours != "@hourly" and self._local(found).fold == 1


def stamp(time: int) -> str:
    """A time as a part of a name: 20261122T030000Z."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=time)).strftime("%Y%m%dT%H%M%SZ")
