"""Starts of workers that fail: backs off, and gives up after so many.

    ready < asked, and the actuator tells of a failed start, or nothing became ready for the start limit
        ─▶ failures + 1 ─▶ pause of 5 s, 10 s, 20 s, ...: no more workers are asked for than are ready
        ─▶ after `tries`: pause of 15 minutes, then one more try
    another worker is ready, or an operator asks for another try ─▶ all is forgotten

The start limit doubles with each failure, so that a start which is only slow succeeds in the end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

from workers.autoscaler.actuators.base import Actual

#: Shortest limit (s) of a start, and how many measured cold starts it may take.
LIMIT_S: Final = 120.0
COLD_STARTS: Final = 4
#: Pause (s) after the first failure, and the longest. Each is twice the one before.
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0
#: Pause (s) after the last try.
GIVEN_UP_S: Final = 900.0


def limit_of(asked: float | None, cold_start: float) -> float:
    """Longest start (s). `asked`: the setting; None: by the measured cold start (s)."""
    return asked if asked is not None else max(LIMIT_S, COLD_STARTS * cold_start)


@dataclass(frozen=True, slots=True)
class Starts:
    """What is remembered of a pool's starts. Kept with its state. Times are unix seconds of the store."""

    failures: int = 0
    """Starts in a row that failed."""
    why: str = ""
    """Why the last one failed."""
    until: float = 0.0
    """End of the pause."""
    since: float | None = None
    """Since when fewer workers are ready than were asked for, without one more."""
    ready: int = 0
    told: int = 0
    """The actuator's own count of failures, as last seen."""
    retried: float = 0.0
    """The last retry of an operator that was heard."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Self:
        """The inverse. Raises TypeError, KeyError or ValueError for anything else."""
        since = said["since"]
        return cls(
            int(said["failures"]),
            str(said["why"]),
            float(said["until"]),
            None if since is None else float(since),
            int(said["ready"]),
            int(said["told"]),
            float(said["retried"]),
        )

    def paused(self, at: float) -> bool:
        return at < self.until

    def asked(self, wanted: int, ready: int, at: float) -> int:
        """The number to ask the actuator for."""
        return min(wanted, ready) if self.paused(at) else wanted

    def seen(
        self, at: float, ready: int, wanted: int, actual: Actual | None, *, limit: float, tries: int, retry: float
    ) -> Starts:
        """After another look. `wanted`: the policy's number. `retry`: when an operator last asked for one."""
        one = self
        if retry > one.retried:
            one = Starts(ready=ready, told=_told(actual), retried=retry)
        if ready > one.ready or (ready and ready >= wanted and not one.paused(at)):
            one = Starts(ready=ready, told=_told(actual), retried=one.retried)
        if ready >= wanted:
            return replace(one, ready=ready, since=None)
        since = at if one.since is None or one.paused(at) else one.since
        one = replace(one, ready=ready, since=since)
        if actual is not None and actual.failures > one.told:
            return one._failed(at, actual.failures - one.told, actual.failing or "its process ended", actual, tries)
        one = replace(one, told=_told(actual))
        late = at - since
        if late > limit * 2**one.failures:
            return one._failed(at, 1, _slow(actual, late), actual, tries)
        return one

    def _failed(self, at: float, more: int, why: str, actual: Actual | None, tries: int) -> Starts:
        failures = self.failures + more
        pause = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE_S)
        until = at + (GIVEN_UP_S if failures >= tries else pause)
        return replace(self, failures=failures, why=why, until=until, since=at, told=_told(actual))

    def trouble(self, at: float, tries: int, pool: str) -> str:
        """What keeps workers from coming up, for people; empty if nothing does."""
        if not self.failures:
            return ""
        starts = "1 start failed" if self.failures == 1 else f"{self.failures} starts in a row failed"
        if not self.paused(at):
            return f"{starts}: {self.why} (trying again)"
        left = f"{self.until - at:.0f} s"
        if self.failures < tries:
            return f"{starts}: {self.why} (the next try is in {left})"
        return f"{starts}: {self.why} (given up; the next try is in {left}, or after `penstock scale retry {pool}`)"


def _told(actual: Actual | None) -> int:
    return actual.failures if actual else 0


def _slow(actual: Actual | None, late: float) -> str:
    failing = f": {actual.failing}" if actual is not None and actual.failing else ""
    return f"no worker became ready for {late:.0f} s{failing}"
