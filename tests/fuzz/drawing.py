"""Hypothesis as a source of examples, for runs that feed many of them to processes and judge them together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")

#: Examples drawn under one seed: the n-th of a run is the same however long the run is.
PAGE = 250


def drawn(strategy: SearchStrategy[T], count: int, start: int) -> Iterator[T]:
    """`count` examples, the same ones for the same `start`."""
    for page in range(-(-count // PAGE)):
        yield from _page(strategy, min(PAGE, count - page * PAGE), start * 1_000_003 + page)


def _page(strategy: SearchStrategy[T], count: int, start: int) -> list[T]:
    found: list[T] = []

    @seed(start)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    collect()
    return found
