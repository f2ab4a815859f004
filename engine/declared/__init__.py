"""Fields that are declared once: a dataclass's field carries its bounds and its option on the command line.

    threads: int | None = declare(None, Integer(1, 4096), "CPU threads.")

`checked` refuses values out of bounds. Whoever makes options, schemas or tables of them asks `declared`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from engine.declared.bounds import Bound


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
    """A field as it was declared. `option`: None where there is none."""

    name: str
    default: Any
    bound: Bound
    option: Option | None


def declare(default: Any, bound: Bound, help: str = "", **more: Any) -> Any:
    """A dataclass's field. `help` and `more`: its Option, unless it has none."""
    return field(default=default, metadata={"bound": bound, "option": Option(help, **more) if help else None})


@cache
def declared(kind: type) -> dict[str, Declared]:
    """The fields of a dataclass by name, in their order."""
    return {field.name: Declared(field.name, field.default, **field.metadata) for field in fields(kind)}


def checked(instance: Any) -> None:
    """Check each field of a new, frozen dataclass; None is always taken where it is the default.

    Lists become tuples. Raises RequestError.
    """
    for declaration in declared(instance.__class__).values():
        value = getattr(instance, declaration.name)
        if value is not None or declaration.default is not None:
            kept = declaration.bound.check(declaration.name, value)
            if kept is not value:
                object.__setattr__(instance, declaration.name, kept)
