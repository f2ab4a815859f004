"""Which sizes of a call give a row the same bits, found by trying.

A call of one size, on one machine, with so many threads, is one program: it does the same operations in the same order
whatever the numbers are. So each of its places has one order of summation, and two places with different ones give the
same bits for random numbers about as seldom as two random numbers are equal, in each of some hundred outputs. What
agreed once is therefore the same for good, and it is enough to call nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from engine.kernels.layer import PreparedLinear

#: Rows of calls that are tried. Dense enough that padding a batch up to one of them adds at most a quarter.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
#: Multiplications and additions that one trial may take, but for the smallest sizes.
_MOST_WORK = 1 << 31
_SMALL = 16
#: torch's allocations begin at multiples of it; elsewhere a library may choose another program.
_ALIGNED = 64


def agreeing(rows_of: Callable[[int], Tensor], sizes: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    """The largest set of `sizes` that give a row the same bits in every place, ascending, and these bits.

    `rows_of(size)` [any number, width]: what calls of that size made of one and the same row, in all of their places.
    Empty where not even two places of any one size agree.
    """
    found: dict[bytes, list[int]] = {}
    for size in sizes:
        bits = rows_of(size).contiguous().view(torch.uint8)
        if bool((bits == bits[:1]).all()):
            found.setdefault(bits[0].numpy().tobytes(), []).append(size)
    if not found:
        return (), b""
    best, chosen = max(found.items(), key=lambda item: (len(item[1]), item[1][-1]))
    return tuple(chosen), best


def agreeing_rows(run: PreparedLinear, weight: Tensor) -> tuple[tuple[int, ...], bytes]:
    """Of a product `run` by `weight` [outputs, inputs]: the counts of rows that agree, always some, and the bits."""
    outputs, inputs = weight.shape
    most = max(_SMALL, _MOST_WORK // (outputs * inputs))
    row = torch.randn(1, inputs, generator=torch.Generator().manual_seed(inputs)).to(weight.dtype)
    return agreeing(lambda size: run(row.repeat(size, 1)), [size for size in SIZES if size <= most])


class FixedRows:
    """A product that is called with agreeing counts of rows only."""

    def __init__(self, run: PreparedLinear, outputs: int, sizes: tuple[int, ...]) -> None:
        self._run = run
        self._outputs = outputs
        self._sizes = sizes

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [rows, inputs] -> [rows, outputs]."""
        rows = len(x)
        pieces = cut(rows, self._sizes)
        if pieces == (rows,):
            return self._run(_aligned(x))
        out = x.new_empty(rows, self._outputs)
        start = 0
        for size in pieces:
            piece = x[start : start + size]
            if len(piece) < size:
                padded = x.new_zeros(size, x.shape[1])
                padded[: len(piece)] = piece
                piece = padded
            end = min(start + size, rows)
            out[start:end] = self._run(_aligned(piece))[: end - start]
            start = end
        return out


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNED else x


@lru_cache(maxsize=1024)
def cut(rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`rows` as a sum of `sizes`, ascending ones, the last of which may have to be padded."""
    pieces = []
    while rows > 0:
        over = next((size for size in sizes if size >= rows), sizes[-1])
        under = max((size for size in sizes if size <= rows), default=over)
        # Reading the weights once more costs as much as some rows.
        size = over if over - rows <= max(rows // 4, 2) else under
        pieces.append(size)
        rows -= size
    return tuple(pieces)
