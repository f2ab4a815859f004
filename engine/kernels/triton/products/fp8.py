"""Rounds rows to 8-bit floats for a product, with largest value, scale and rounding in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import fp8
from engine.kernels.triton.norm import WIDEST, row_warps

_LARGEST: tl.constexpr = tl.constexpr(fp8.LARGEST)
_LEAST: tl.constexpr = tl.constexpr(fp8.LEAST)


@triton.jit
def quantise_rows_kernel(
    x_ptr, values_ptr, scales_ptr, row_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 0), _LEAST)
    tl.store(scales_ptr + row, tl.div_rn(largest, _LARGEST))
    # The padding up to the product's width is zero.
    scaled = tl.clamp(x * tl.div_rn(_LARGEST, largest), -_LARGEST, _LARGEST)
    tl.store(values_ptr + row * PADDED + column, scaled.to(tl.float8e4nv), mask=column < PADDED)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8.quantise_rows`, to the bit. `x`: [rows, width], the last dimension dense."""
    rows, width = x.shape
    if width > WIDEST:
        return fp8.quantise_rows(x)
    padded = width + -width % 16
    values = torch.empty((rows, padded), dtype=fp8.FP8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(padded)
        quantise_rows_kernel[(rows,)](
            x,
            values,
            scales,
            x.stride(0),
            WIDTH=width,
            PADDED=padded,
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return values, scales
