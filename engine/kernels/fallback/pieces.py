"""Sizes of CPU operations that one thread runs faster alone.

torch shares an operation among threads if it has more numbers than torch's grain size. For only a few times as many,
waking a sleeping thread and waiting for it takes longer than its work.
"""

from __future__ import annotations

from typing import Final

#: The most numbers of an operation that torch runs on the calling thread alone (at::internal::GRAIN_SIZE).
_GRAIN: Final = 32768
#: The number of pieces beyond which threads pay.
_MOST: Final = 4


def piece(rows: int, width: int) -> int:
    """The number of rows of `width` numbers to process at one time. All `rows` if threads pay."""
    fit = (_GRAIN - 1) // width
    return fit if fit < rows <= _MOST * fit else rows
