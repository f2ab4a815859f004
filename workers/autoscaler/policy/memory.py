"""Memory: what the scaling policy knows of the past. It travels as JSON with each kept decision, and is read back."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

T = TypeVar("T")

#: The pydantic settings for states that are read back: numbers are numbers and finite, and no field is unknown.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def restored(kind: type[T], said: Any) -> T:
    """The inverse of `dataclasses.asdict`. Raises ValueError for anything else; fields that are missing have their
    default."""
    hashable: Any = kind
    try:
        found: T = _reader(hashable).validate_json(json.dumps(said))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"no {kind.__name__}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return found


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
    below: tuple[tuple[int, Count], ...] = ()
    """(level that tasks wait for, workers of earlier releases): as few as there were since the tasks wait."""
    seen_at: float | None = None
    """The last time that the pool was seen."""

    def moved(self, by: float) -> Self:
        """The same with all its times moved."""
        moved = [None if time is None else time + by for time in (getattr(self, name) for name in TIMES)]
        changed, turned, empty, busy = moved
        raw = tuple((when + by, number) for when, number in self.raw)
        return replace(self, changed_at=changed, turned_at=turned, empty_since=empty, busy_since=busy, raw=raw)
