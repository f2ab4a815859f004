"""Fields that are declared once: a dataclass's field carries its bounds and its option on the command line.

    threads: Annotated[int | None, Integer(1, 4096), Option("CPU threads.")] = None

`checked` refuses values out of bounds. Whoever makes options, schemas or tables of them asks `declared`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_type_hints

from engine.bounds import Bound


@dataclass(eq=False, repr=False)
class Option:
    """A field's option on the command line. `name`: as it is written, unless it is called as the field.

    `serving`: it is for an engine that serves many requests. `of_model`: a model may have a default of its own.
    """

    help: str
    name: str = ""
    metavar: str | None = None
    serving: bool = False
    of_model: bool = False


@dataclass(eq=False, repr=False)
class Declared:
    """What is declared of one field. `bound`: None where any value is taken. `option`: None where there is none."""

    name: str
    default: Any
    bound: Bound | None
    option: Option | None


@cache
def declared(kind: type) -> dict[str, Declared]:
    """The fields of a dataclass by name, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for one in fields(kind):
        extras = getattr(hints[one.name], "__metadata__", ())
        option = next((extra for extra in extras if isinstance(extra, Option)), None)
        bound = next((extra for extra in extras if not isinstance(extra, Option)), None)
        found[one.name] = Declared(one.name, one.default, bound, option)
    return found


def checked(made: Any) -> None:
    """Check each field of a new, frozen dataclass; None is always taken where it is the default.

    Lists become tuples. Raises RequestError.
    """
    for one in declared(made.__class__).values():
        value = getattr(made, one.name)
        if one.bound is not None and not (value is None and one.default is None):
            kept = one.bound.check(one.name, value)
            if kept is not value:
                object.__setattr__(made, one.name, kept)
