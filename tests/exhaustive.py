"""Marks for `make test-all`: `make test` takes a few cases of each family, so that it ends within minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters for pytest, of which `make test` takes the `kept` ones; a tuple is of several.

    Raises ValueError for one to be kept that is no case.
    """
    cases = list(cases)
    if unknown := [one for one in kept if one not in cases]:
        raise ValueError(f"{unknown} are not among the cases {cases}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in kept else pytest.mark.exhaustive
        )
        for case in cases
    ]


def one_of_each(kind: Callable[[Any], object], table: dict[str, Any]) -> list[Any]:
    """As `few`, of the names of a table: `make test` takes the first whose value is of each kind."""
    kept = {kind(value): name for name, value in reversed(table.items())}
    return few(table, *kept.values())
