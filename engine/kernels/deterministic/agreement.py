"""Finds by trial the call sizes that give a row the same bits in every place.

A call of one size, on one machine, with a fixed number of threads, runs the same operations in the same order, whatever
the numbers. So each place in the call has one order of summation. Two places with different orders give the same bits
for random numbers about as rarely as two random numbers are equal, in each of some hundred outputs. So sizes that
agreed once always agree, and calling only those sizes is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from engine.kernels.layer import PreparedLinear

#: The row counts to try, dense enough that padding a batch to the next one adds at most a quarter.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
#: The most multiplications and additions of one trial, except for the smallest sizes.
_MOST_WORK = 1 << 31
_SMALL = 16
#: The alignment of torch's allocations in bytes. For other addresses a library may run another program.
_ALIGNED = 64


def agreeing(rows_of: Callable[[int], Tensor], sizes: Sequence[int]) -> tuple[tuple[int, ...], bytes]:
    """The largest set of `sizes` that give a row the same bits in every place, ascending, and these bits.

    `rows_of(size)`: [any number, width], the results of calls of that size for the same row in every place. Returns an
    empty set if the places of no size agree.
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
    """The row counts that agree (always at least one), and the bits, of a product `run` with `weight`, [outputs,
    inputs]."""
    outputs, inputs = weight.shape
    most = max(_SMALL, _MOST_WORK // (outputs * inputs))
    row = torch.randn(1, inputs, generator=torch.Generator().manual_seed(inputs)).to(weight.dtype)
    return agreeing(lambda size: run(row.repeat(size, 1)), [size for size in SIZES if size <= most])


class FixedRows:
    """A product that is only called with row counts that agree."""

    def __init__(self, run: PreparedLinear, outputs: int, sizes: tuple[int, ...]) -> None:
        self._run = run
        self._outputs = outputs
        self._sizes = sizes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x`, [rows, inputs]. Returns [rows, outputs]."""
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
    """Split `rows` into a sum of `sizes`, which are ascending. The last part may need padding."""
    pieces = []
    while rows > 0:
        over = next((size for size in sizes if size >= rows), sizes[-1])
        under = max((size for size in sizes if size <= rows), default=over)
        # Another pass over the weights costs as much as some rows.
        size = over if over - rows <= max(rows // 4, 2) else under
        pieces.append(size)
        rows -= size
    return tuple(pieces)
