"""How many rows an operation takes at a time on a CPU, so that one thread does little work alone.

torch shares among threads what has more numbers than its grain. For a few times as many, waking a thread that sleeps,
and waiting for it, takes longer than what it does.
"""

from __future__ import annotations

from typing import Final

#: Numbers of an operation that torch computes on the thread that calls it (at::internal::GRAIN_SIZE).
_GRAIN: Final = 32768
#: Pieces beyond which threads pay.
_MOST: Final = 4


def piece(rows: int, width: int) -> int:
    """Rows of `width` numbers each to be taken at a time, of so many in all: `rows` where threads pay."""
    fit = (_GRAIN - 1) // width
    return fit if fit < rows <= _MOST * fit else rows
