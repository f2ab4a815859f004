"""Products of weights of 4 and 8 bits with activations in half precision.

Up to MOST_ROWS rows, the time goes into reading the weights. They are dequantised in registers, and the inputs are
split between programs so that the whole device reads. Each program writes its part of the sum, and a second launch adds
the parts, always in the same order. With more rows the product costs more than the weights. Then the weights are
dequantised to memory in the activations' dtype, and cuBLAS multiplies. The same is done for activations in fp32, which
tensor cores do not multiply.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from engine.kernels.layer import PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.triton.products.quantised_kernels import (
    int4_kernel,
    int4_unpack_kernel,
    int8_kernel,
    int8_unpack_kernel,
    sum_kernel,
)

MOST_ROWS = 64
#: The wanted number of programs of a launch with few rows: two for each multiprocessor of an H100 or H200. It is fixed,
#: so that sums are split alike on all devices. It does not depend on the number of rows either, so that a row is summed
#: in the same way in any batch.
_PROGRAMS = 264
_SPLIT_OUTPUTS = 128
#: The fewest tiles of a part of the sum. Fewer do not pay.
_LEAST_TILES = 4
#: The columns of a program that adds parts, and the outputs of one that dequantises.
SUMMED, UNPACKED = 1024, 32


@dataclass(frozen=True, slots=True)
class Tiling:
    rows: int
    """The product's narrow side: the number of rows, rounded up to 16, 32 or 64."""
    outputs: int
    """The outputs of one program."""
    warps: int
    stages: int
    """The loads in flight in a program."""


#: The tilings by rows. More rows read more activations for each weight, and wider programs read them less often.
INT4_TILINGS = (Tiling(16, 128, 4, 4), Tiling(32, 128, 8, 4), Tiling(64, 256, 16, 4))
#: The tilings with zero points, which need registers that programs of 16 warps do not have.
INT4_ZEROS_TILINGS = (*INT4_TILINGS[:2], Tiling(64, 128, 8, 4))
INT8_TILINGS = (Tiling(16, 128, 4, 4), Tiling(32, 128, 8, 4), Tiling(64, 128, 8, 4))


def splits(outputs: int, tiles: int) -> int:
    """The number of parts of the sum over the inputs."""
    parts = -(-_PROGRAMS // -(-outputs // _SPLIT_OUTPUTS))
    each = max(_LEAST_TILES, -(-tiles // parts))
    return -(-tiles // each)


def int4_linear(weight: Int4Weight, bias: Tensor | None) -> PreparedLinear:
    """A product x [rows, inputs] -> [rows, outputs] in the dtype of `x`, summed in fp32. `bias`: [outputs]."""
    outputs, inputs = weight.shape
    group = 0 if weight.group == inputs else weight.group
    tilings = INT4_TILINGS if weight.zeros is None else INT4_ZEROS_TILINGS

    def linear(x: Tensor) -> Tensor:
        if len(x) > MOST_ROWS or x.dtype == torch.float32:
            dense = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
            int4_unpack_kernel[(triton.cdiv(outputs, UNPACKED), len(weight.packed))](
                weight.packed,
                weight.scales,
                weight.zeros,
                dense,
                outputs,
                inputs,
                GROUP=group,
                PLANE=weight.plane,
                ZEROS=weight.zeros is not None,
                OUTPUTS=UNPACKED,
            )
            return F.linear(x, dense, bias)
        split = _Split(x, outputs, len(weight.packed), bias, tilings)
        if len(x):
            int4_kernel[split.grid](
                x,
                weight.packed,
                weight.scales,
                weight.zeros,
                bias,
                split.parts,
                len(x),
                x.stride(0),
                outputs,
                inputs,
                len(weight.packed),
                split.tiles_each,
                GROUP=group,
                PLANE=weight.plane,
                ZEROS=weight.zeros is not None,
                EVEN=inputs % (2 * weight.plane) == 0,
                **split.options,
            )
        return split.total()

    return linear


def int8_linear(weight: Int8Weight, bias: Tensor | None) -> PreparedLinear:
    """Like int4_linear, for 8 bits."""
    outputs, inputs = weight.shape
    group = 0 if weight.group == inputs else weight.group

    def linear(x: Tensor) -> Tensor:
        if len(x) > MOST_ROWS or x.dtype == torch.float32:
            dense = torch.empty(weight.shape, dtype=x.dtype, device=x.device)
            int8_unpack_kernel[(triton.cdiv(outputs, UNPACKED), len(weight.packed))](
                weight.packed,
                weight.scales,
                dense,
                outputs,
                inputs,
                GROUP=group,
                TILE=weight.tile,
                OUTPUTS=UNPACKED,
            )
            return F.linear(x, dense, bias)
        split = _Split(x, outputs, len(weight.packed), bias, INT8_TILINGS)
        if len(x):
            int8_kernel[split.grid](
                x,
                weight.packed,
                weight.scales,
                bias,
                split.parts,
                len(x),
                x.stride(0),
                outputs,
                inputs,
                len(weight.packed),
                split.tiles_each,
                GROUP=group,
                TILE=weight.tile,
                EVEN=inputs % weight.tile == 0,
                **split.options,
            )
        return split.total()

    return linear


class _Split:
    """A product with few rows, cut into parts."""

    def __init__(self, x: Tensor, outputs: int, tiles: int, bias: Tensor | None, tilings: tuple[Tiling, ...]) -> None:
        how = next(each for each in tilings if len(x) <= each.rows)
        parts = splits(outputs, tiles)
        self.tiles_each = triton.cdiv(tiles, parts)
        self.grid = (triton.cdiv(outputs, how.outputs), parts)
        self.options = {
            # With several parts, the sum of the parts adds the bias.
            "BIAS": bias is not None and parts == 1,
            "WHOLE": parts == 1,
            "ROWS": how.rows,
            "OUTPUTS": how.outputs,
            "STAGES": how.stages,
            "num_warps": how.warps,
        }
        self._bias = bias
        self._out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        self.parts = self._out if parts == 1 else torch.empty((parts, *self._out.shape), device=x.device)
        """fp32 [splits, rows, outputs], or the result itself if there is one part."""

    def total(self) -> Tensor:
        rows, outputs = self._out.shape
        if self.parts is not self._out and rows:
            sum_kernel[(rows, triton.cdiv(outputs, SUMMED))](
                self.parts,
                self._bias,
                self._out,
                rows,
                outputs,
                BIAS=self._bias is not None,
                SPLITS=len(self.parts),
                BLOCK=SUMMED,
            )
        return self._out
