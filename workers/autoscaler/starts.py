"""Backs off from starts of workers that fail, and gives up after a number of them.

    ready < requested, and the actuator reports a failed start, or nothing became ready for the start limit
        ─▶ failures + 1 ─▶ pause of 5 s, 10 s, 20 s, ...: no more workers are requested than were ready
        ─▶ after `tries`: pause of 15 minutes, then one more try
    another worker is ready, or an operator requests a retry ─▶ all is forgotten

The start limit doubles with each failure, so that a start which is only slow succeeds in the end.

Workers whose leases lapse while the store is away are not ready for a moment, and well: so a lower number of ready
workers is believed only once it was seen for a minute, and a time that was not seen does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final

from pydantic import Field, with_config

from workers.autoscaler.actuators import Actual
from workers.autoscaler.policy import STRICT, Count

Time = Annotated[float, Field(ge=0)]

#: Shortest limit (s) of a start, and how many measured cold starts it may take.
LIMIT_S: Final = 120.0
COLD_STARTS: Final = 4
#: Pause (s) after the first failure, and the longest. Each is twice the one before.
FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0
#: Pause (s) after the last try.
GIVEN_UP_S: Final = 900.0
#: Time (s) after which a lower number of ready workers is believed, and the longest time between two looks at it.
SURE_S: Final = 60.0
BLIND_S: Final = 15.0


def limit_of(setting: float | None, cold_start: float) -> float:
    """Longest start (s). `setting`: the setting; None: by the measured cold start (s)."""
    return setting if setting is not None else max(LIMIT_S, COLD_STARTS * cold_start)


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Starts:
    """The memory of a pool's starts. Kept with its state. Times are unix seconds of the store."""

    failures: Count = 0
    """Starts in a row that failed."""
    why: str = ""
    """The reason of the last failure."""
    until: Time = 0.0
    """End of the pause."""
    since: Time | None = None
    """Since when fewer workers are ready than are wanted, without one more."""
    ready: Count = 0
    """Workers that were ready at the last look."""
    sure: Count = 0
    """Workers that are ready for sure: fewer are believed later."""
    fewer_since: Time | None = None
    """Since when fewer than those are ready."""
    seen_at: Time = 0.0
    counted: Count | None = None
    """The actuator's own count of failures, as last seen."""
    retried: Time = 0.0
    """The last retry of an operator that was carried out."""

    def paused(self, at: float) -> bool:
        """Whether no new worker is tried. A pause longer than any counts as over: the clock was set back."""
        return 0 < self.until - at <= GIVEN_UP_S

    def request(self, target: int, at: float) -> int:
        """The number to request from the actuator."""
        return min(target, self.sure) if self.paused(at) else target

    def updated(
        self,
        at: float,
        ready: int,
        target: int,
        actual: Actual | None,
        *,
        limit: float,
        tries: int,
        retry: float,
        unready: str = "",
    ) -> Starts:
        """The memory after another look.

        `target`: the policy's number. `retry`: the time of an operator's last request to retry. `unready`:
        why workers that are there take no tasks.
        """
        starts = self._believing(at, ready)
        if retry and retry != starts.retried:
            starts = replace(starts._well(actual), retried=retry)
        if ready > self.ready or (ready and ready >= target and not starts.paused(at)):
            starts = starts._well(actual)
        if ready >= target:
            return replace(starts, since=None, counted=_count(actual))
        since = at if starts.since is None or starts.paused(at) else min(starts.since, at)
        starts = replace(starts, since=since)
        if actual is not None and starts.counted is not None and actual.failures > starts.counted:
            more = actual.failures - starts.counted
            return starts._failed(at, more, actual.failing or "its process ended", actual, tries)
        starts = replace(starts, counted=_count(actual))
        late = at - since
        if late > limit * 2.0 ** min(starts.failures, 10):
            return starts._failed(at, 1, _slow(actual, late, unready), actual, tries)
        return starts

    def _believing(self, at: float, ready: int) -> Starts:
        """The memory with the number of ready workers; a lower one is believed after a while."""
        starts = replace(self, ready=ready, seen_at=at)
        if ready >= self.sure:
            return replace(starts, sure=ready, fewer_since=None)
        if self.fewer_since is None or not 0 <= at - self.seen_at <= BLIND_S:
            return replace(starts, fewer_since=at)
        return replace(starts, sure=ready, fewer_since=None) if at - self.fewer_since > SURE_S else starts

    def _well(self, actual: Actual | None) -> Starts:
        """The memory without any failure."""
        return replace(self, failures=0, why="", until=0.0, since=None, counted=_count(actual))

    def _failed(self, at: float, more: int, why: str, actual: Actual | None, tries: int) -> Starts:
        failures = self.failures + more
        pause = min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE_S)
        until = at + (GIVEN_UP_S if failures >= tries else pause)
        return replace(self, failures=failures, why=why, until=until, since=at, counted=_count(actual))

    def given_up(self, at: float, tries: int) -> float | None:
        """The time at which the last of all tries failed; None while there are more, or after the pause."""
        return self.until - GIVEN_UP_S if self.failures >= tries and self.paused(at) else None

    def trouble(self, at: float, tries: int, pool: str) -> str:
        """The reason why workers do not come up, for people; empty if there is none."""
        if not self.failures:
            return ""
        failed = "1 try failed" if self.failures == 1 else f"{self.failures} tries in a row failed"
        if not self.paused(at):
            return f"{failed}: {self.why} (trying again)"
        pause = f"{self.until - at:.0f} s"
        if self.failures < tries:
            return f"{failed}: {self.why} (the next try is in {pause})"
        return f"{failed}: {self.why} (given up; the next try is in {pause}, or after `penstock scale retry {pool}`)"


def _count(actual: Actual | None) -> int | None:
    return None if actual is None else actual.failures


def _slow(actual: Actual | None, late: float, unready: str) -> str:
    if unready:
        return f"held back for {late:.0f} s: {unready}"
    failing = f": {actual.failing}" if actual is not None and actual.failing else ""
    return f"no worker became ready for {late:.0f} s{failing}"
