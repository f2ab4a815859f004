"""Device kernels for weights of 4 and 8 bits: products with few rows, in parts, and dequantisation."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.packed import MIDDLE

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
        place = out_ptr + output.to(tl.int64)[:, None] * inputs + begin + within[None]
        inside = real[:, None] & (begin + within < inputs)[None]
        tl.store(place, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


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
    place = out_ptr + output.to(tl.int64)[:, None] * inputs + input[None]
    inside = real[:, None] & (input < inputs)[None]
    tl.store(place, (value * scale[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
