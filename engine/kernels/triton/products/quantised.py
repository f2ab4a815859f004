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
import triton.language as tl
from torch import Tensor

from engine.kernels.layer import PreparedLinear
from engine.kernels.packed import MIDDLE, Int4Weight, Int8Weight

MOST_ROWS = 64
#: The fewest inputs of a group. The tiles of smaller ones would be too small.
LEAST_GROUP = 32
#: The wanted number of programs of a launch with few rows: two for each multiprocessor of an H100 or H200. It is fixed,
#: so that sums are split alike on all devices. It does not depend on the number of rows either, so that a row is summed
#: in the same way in any batch.
_PROGRAMS = 264
_SPLIT_OUTPUTS = 128
#: The fewest tiles of a part of the sum. Fewer do not pay.
_LEAST_TILES = 4
#: The columns of a program that adds parts, and the outputs of one that dequantises.
SUMMED, UNPACKED = 1024, 32
#: The bits of 2**23 in fp32, and its value. A small integer in the lowest bits adds itself to the value.
_MAGIC: tl.constexpr = tl.constexpr(0x4B000000)
_MAGIC_VALUE: tl.constexpr = tl.constexpr(8388608.0)
_MIDDLE: tl.constexpr = tl.constexpr(MIDDLE)


@triton.jit
def _halves(packed, low_zero, high_zero, dtype: tl.constexpr):
    """The low halves of bytes less `low_zero`, and the high halves less `high_zero`. The results are exact.

    It uses the fewest integer operations, which would limit the kernel before memory does, and no conversions of
    integers, which are slower still.
    """
    both = (packed | _MAGIC).to(tl.float32, bitcast=True)
    high = ((packed & 240) | _MAGIC).to(tl.float32, bitcast=True)
    low = both - (high + low_zero)
    return low.to(dtype), (high * 0.0625 - (_MAGIC_VALUE / 16 + high_zero)).to(dtype)


@triton.jit
def _some(at, input, inputs, EVEN: tl.constexpr):
    """Load activations, with zeros beyond the last input."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=input < inputs, other=0.0)


@triton.jit
def _store_part(out_ptr, bias_ptr, sums, output, outputs, row, rows, BIAS: tl.constexpr, WHOLE: tl.constexpr):
    """Store `sums`, [outputs, rows], in the result or in this program's part of it."""
    if WHOLE and BIAS:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    part = out_ptr + tl.program_id(1).to(tl.int64) * rows * outputs
    inside = (output < outputs)[:, None] & (row < rows)[None]
    tl.store(part + row[None] * outputs + output[:, None], sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles", "tiles_each"])
def int4_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    rows,
    x_stride,
    outputs,
    inputs,
    tiles,
    tiles_each,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (o, s): OUTPUTS outputs of all rows, over the tiles of split s.

    GROUP is 0 if there is only one group. WHOLE: there is one split, whose sum is the result. EVEN: the inputs are a
    whole number of tiles. The weights are the left operand, so that few rows fill a narrow tile and not a high one.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    within = tl.arange(0, PLANE)
    dtype = x_ptr.dtype.element_ty
    # Outputs and rows beyond the last read the last one's data and are not written, so no load in the loop needs a
    # mask.
    output_at, row_at = tl.minimum(output, outputs - 1), tl.minimum(row, rows - 1)
    first = tl.program_id(1) * tiles_each
    packed_at = packed_ptr + first.to(tl.int64) * outputs * PLANE
    packed_offset = output_at[:, None] * PLANE + within[None]
    x_at = x_ptr + first * 2 * PLANE
    x_offset = row_at[None] * x_stride + within[:, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for tile in tl.range(first, min(first + tiles_each, tiles), num_stages=STAGES):
        packed = tl.load(packed_at + packed_offset).to(tl.int32)
        low_x = _some(x_at + x_offset, tile * (2 * PLANE) + within[:, None], inputs, EVEN)
        high_x = _some(x_at + PLANE + x_offset, tile * (2 * PLANE) + PLANE + within[:, None], inputs, EVEN)
        packed_at += outputs * PLANE
        x_at += 2 * PLANE
        if GROUP % (2 * PLANE) == 0:  # each tile is in one group
            group = tile * (2 * PLANE) // GROUP if GROUP > 0 else 0
            scale = tl.load(scales_ptr + group * outputs + output_at).to(tl.float32)[:, None]
            zero = _MIDDLE
            if ZEROS:
                zero = tl.load(zeros_ptr + group * outputs + output_at).to(tl.float32)[:, None]
            low, high = _halves(packed, zero, zero, dtype)
            part = tl.dot(low, low_x, input_precision="ieee")
            sums += tl.dot(high, high_x, part, input_precision="ieee") * scale
        else:
            group = tile * (2 * PLANE) // GROUP
            # If the inputs end within a tile, its second half may have no group.
            high_group = min((tile * (2 * PLANE) + PLANE), inputs - 1) // GROUP
            scale = tl.load(scales_ptr + group * outputs + output_at).to(tl.float32)[:, None]
            high_scale = tl.load(scales_ptr + high_group * outputs + output_at).to(tl.float32)[:, None]
            zero, high_zero = _MIDDLE, _MIDDLE
            if ZEROS:
                zero = tl.load(zeros_ptr + group * outputs + output_at).to(tl.float32)[:, None]
                high_zero = tl.load(zeros_ptr + high_group * outputs + output_at).to(tl.float32)[:, None]
            low, high = _halves(packed, zero, high_zero, dtype)
            sums += tl.dot(low, low_x, input_precision="ieee") * scale
            sums += tl.dot(high, high_x, input_precision="ieee") * high_scale
    _store_part(out_ptr, bias_ptr, sums, output, outputs, row, rows, BIAS, WHOLE)


@triton.jit(do_not_specialize=["rows", "tiles", "tiles_each"])
def int8_kernel(
    x_ptr,
    packed_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    rows,
    x_stride,
    outputs,
    inputs,
    tiles,
    tiles_each,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Like int4_kernel, for 8 bits."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    within = tl.arange(0, TILE)
    output_at, row_at = tl.minimum(output, outputs - 1), tl.minimum(row, rows - 1)
    first = tl.program_id(1) * tiles_each
    packed_at = packed_ptr + first.to(tl.int64) * outputs * TILE
    packed_offset = output_at[:, None] * TILE + within[None]
    x_at = x_ptr + first * TILE
    x_offset = row_at[None] * x_stride + within[:, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for tile in tl.range(first, min(first + tiles_each, tiles), num_stages=STAGES):
        weight = tl.load(packed_at + packed_offset).to(x_ptr.dtype.element_ty)
        x = _some(x_at + x_offset, tile * TILE + within[:, None], inputs, EVEN)
        packed_at += outputs * TILE
        x_at += TILE
        if GROUP > 0:
            scale = tl.load(scales_ptr + tile * TILE // GROUP * outputs + output_at)
            sums += tl.dot(weight, x, input_precision="ieee") * scale.to(tl.float32)[:, None]
        else:
            sums = tl.dot(weight, x, sums, input_precision="ieee")
    if GROUP == 0:
        sums *= tl.load(scales_ptr + output_at).to(tl.float32)[:, None]
    _store_part(out_ptr, bias_ptr, sums, output, outputs, row, rows, BIAS, WHOLE)


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    parts_ptr, bias_ptr, out_ptr, rows, outputs, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add `parts`, [splits, rows, outputs] -> [rows, outputs], in the order of the splits."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = output < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (split * rows + row) * outputs + output, mask=real, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + output, total.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def int4_unpack_kernel(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    outputs,
    inputs,
    GROUP: tl.constexpr,
    PLANE: tl.constexpr,
    ZEROS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Program (o, t): dequantise OUTPUTS outputs of one tile into rows of `out`, [outputs, inputs]."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tile = tl.program_id(1)
    real = output < outputs
    within = tl.arange(0, PLANE)
    at = (output.to(tl.int64) + tile * outputs)[:, None] * PLANE + within[None]
    packed = tl.load(packed_ptr + at, mask=real[:, None], other=0).to(tl.int32)
    for half in tl.static_range(2):
        begin = (tile * 2 + half) * PLANE
        group = min(begin, inputs - 1) // GROUP if GROUP > 0 else 0
        scale = tl.load(scales_ptr + group * outputs + output, mask=real, other=0.0).to(tl.float32)
        value = (packed >> 4 * half & 15).to(tl.float32)
        if ZEROS:
            value -= tl.load(zeros_ptr + group * outputs + output, mask=real, other=0).to(tl.float32)[:, None]
        else:
            value -= _MIDDLE
        out_at = out_ptr + output.to(tl.int64)[:, None] * inputs + begin + within[None]
        inside = real[:, None] & (begin + within < inputs)[None]
        tl.store(out_at, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def int8_unpack_kernel(
    packed_ptr, scales_ptr, out_ptr, outputs, inputs, GROUP: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr
):
    """Like int4_unpack_kernel, for 8 bits."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tile = tl.program_id(1)
    real = output < outputs
    input = tile * TILE + tl.arange(0, TILE)
    at = (output.to(tl.int64) + tile * outputs)[:, None] * TILE + tl.arange(0, TILE)[None]
    value = tl.load(packed_ptr + at, mask=real[:, None], other=0).to(tl.float32)
    group = tile * TILE // GROUP if GROUP > 0 else 0
    scale = tl.load(scales_ptr + group * outputs + output, mask=real, other=0.0).to(tl.float32)
    out_at = out_ptr + output.to(tl.int64)[:, None] * inputs + input[None]
    inside = real[:, None] & (input < inputs)[None]
    tl.store(out_at, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


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
