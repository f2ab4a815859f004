"""Counts the kernels that Triton compiles in this process, and those that it finds in its cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Compiled:
    """The names of kernels, once for each specialisation."""

    built: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)


@contextmanager
def count_compiled() -> Iterator[Compiled]:
    """A context that counts compiled kernels. It counts nothing if Triton is not installed."""
    found = Compiled()
    try:
        from triton import knobs
    except ImportError:
        yield found
        return

    def listener(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        (found.cached if cache_hit else found.built).append(src.name)

    with knobs.compilation.scope():
        knobs.compilation.listener = listener
        yield found
