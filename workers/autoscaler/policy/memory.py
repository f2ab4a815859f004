"""Memory: what the scaling policy knows of the past. It travels as JSON with each kept decision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final, Self

from pydantic import Field, with_config

from workers.autoscaler.policy.kept import STRICT

#: A number of workers.
Count = Annotated[int, Field(ge=0)]

#: Times that move together when the clock jumps.
TIMES: Final = ("changed_at", "turned_at", "empty_since", "busy_since")


@with_config(STRICT)
@dataclass(frozen=True, slots=True)
class Memory:
    """The policy's knowledge of the past. Kept with each decision, so that another leader goes on from it."""

    wanted: Count = 0
    changed_at: float | None = None
    """Last change of the number (unix s)."""
    turned_at: float | None = None
    """Last time that it grew after it had shrunk."""
    shrank: bool = False
    """The last change was downward."""
    raw: tuple[tuple[float, Count], ...] = ()
    """(time, raw number), falling numbers: the first is the largest of the last cool-down."""
    empty_since: float | None = None
    """Since when nothing is queued or in flight."""
    busy_since: float | None = None
    """Since when the duty cycle is high."""
    seen_at: float | None = None
    """The last time that the pool was seen."""

    def moved(self, by: float) -> Self:
        """The same with all its times moved."""
        moved = [None if time is None else time + by for time in (getattr(self, name) for name in TIMES)]
        changed, turned, empty, busy = moved
        raw = tuple((when + by, number) for when, number in self.raw)
        return replace(self, changed_at=changed, turned_at=turned, empty_since=empty, busy_since=busy, raw=raw)
