"""Reads back what was kept as JSON with a decision: memory, signals, starts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

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
