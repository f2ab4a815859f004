"""Memory: what the scaling policy knows of the past. It travels as JSON with each kept decision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Final, Self

#: Times that move together when the clock jumps.
TIMES: Final = ("changed_at", "turned_at", "empty_since", "busy_since")


@dataclass(frozen=True, slots=True)
class Memory:
    """The policy's knowledge of the past. Kept with each decision, so that another leader goes on from it."""

    wanted: int = 0
    changed_at: float | None = None
    """Last change of the number (unix s)."""
    turned_at: float | None = None
    """Last time that it grew after it had shrunk."""
    shrank: bool = False
    """The last change was downward."""
    raw: tuple[tuple[float, int], ...] = ()
    """(time, raw number), falling numbers: the first is the largest of the last cool-down."""
    empty_since: float | None = None
    """Since when nothing is queued or in flight."""
    busy_since: float | None = None
    """Since when the duty cycle is high."""
    seen_at: float | None = None
    """The last time that the pool was seen."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def moved(self, by: float) -> Self:
        """The same with all its times moved."""
        moved = [None if time is None else time + by for time in (getattr(self, name) for name in TIMES)]
        changed, turned, empty, busy = moved
        raw = tuple((when + by, number) for when, number in self.raw)
        return replace(self, changed_at=changed, turned_at=turned, empty_since=empty, busy_since=busy, raw=raw)

    @classmethod
    def of(cls, said: Any) -> Self:
        """The inverse of `to_dict`. Raises ValueError for anything else; keys that are missing have their default."""
        if not isinstance(said, dict) or not said.keys() <= set(cls.__slots__):
            raise ValueError(f"no memory of the policy: {str(said)[:200]}")
        try:
            times = {name: _time(said[name]) for name in (*TIMES, "seen_at") if name in said}
            raw = tuple((_some(_time(at)), _whole(number)) for at, number in said.get("raw", ()))
            return cls(_whole(said.get("wanted", 0)), shrank=said.get("shrank", False) is True, raw=raw, **times)
        except (TypeError, ValueError) as error:
            raise ValueError(f"no memory of the policy: {error}") from error


def _time(said: Any) -> float | None:
    if said is None:
        return None
    if isinstance(said, bool) or not isinstance(said, int | float) or not isfinite(said):
        raise ValueError(f"{said!r} is no time")
    return float(said)


def _some(time: float | None) -> float:
    if time is None:
        raise ValueError("a raw number has no time")
    return time


def _whole(said: Any) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise ValueError(f"{said!r} is no number of workers")
    return said
