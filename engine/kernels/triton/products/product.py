"""Products in tiles of one size, which sum a row in the same way in any batch.

The sum over the inputs is cut into parts by the weight's shape alone. Each part is summed from its first input to its
last, and the parts are added from first to last. With few rows, each program makes one part, because fewer programs
would not keep the device reading, and a second launch adds the parts. With many rows, a program makes all parts of its
tile, one after another. Both do the same operations in the same order. The padding and the place of a row in its tile
change nothing, because the rows of a tensor core's product are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.fp8 import QuantiseRows
from engine.kernels.fp8 import quantise_rows as quantise_plainly
from engine.kernels.layer import PreparedLinear

#: The size of a tile. Multiplying this many rows takes about as long as reading the weights for them.
ROWS, OUTPUTS = 64, 128
#: The wanted number of programs of a launch with few rows. It is fixed, so that sums are cut alike on all devices.
_PROGRAMS = 132
#: The fewest rounds of a part of the sum. Fewer do not pay.
_LEAST_ROUNDS = 8
#: The most rows for which each program makes one part. With more, programs make all parts of their tiles.
MOST_APART = 256
#: The columns of a program that adds parts.
_SUMMED = 1024


@dataclass(frozen=True, slots=True)
class Depth:
    inputs: int
    """The inputs of one round."""
    stages: int


#: The depth by the bytes of an element.
DEPTHS = {1: Depth(128, 4), 2: Depth(64, 4), 4: Depth(32, 3)}


@triton.jit
def _scaled(total, row_scale, output_scale, bias, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Scale a sum and add the bias. The fma is explicit, because the compiler might else fuse only some of the
    operations, with other roundings."""
    if SCALED and BIAS:
        return tl.fma(total * output_scale, row_scale, bias)
    if SCALED:
        return total * output_scale * row_scale
    return total + bias if BIAS else total


@triton.jit(do_not_specialize=["rows", "rounds", "rounds_each", "parts"])
def product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    row_scales,
    output_scales,
    out_ptr,
    rows,
    x_stride,
    outputs,
    inputs,
    rounds,
    rounds_each,
    parts,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    APART: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (r, o, p): a tile of rows and outputs. With APART, only part p, written to fp32 [parts, rows, outputs].

    The weights are the left operand, so that tiles have few rows and many outputs. EVEN: the inputs are a whole number
    of rounds.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    within = tl.arange(0, INPUTS)
    # Outputs and rows beyond the last read the last one's data and are not written.
    weight_at = weight_ptr + tl.minimum(output, outputs - 1).to(tl.int64)[:, None] * inputs + within[None]
    x_at = x_ptr + tl.minimum(row, rows - 1).to(tl.int64)[None] * x_stride + within[:, None]
    first = tl.program_id(2) if APART else 0
    last = first + 1 if APART else parts
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for part in tl.range(first, last):
        sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
        for at in tl.range(part * rounds_each, min((part + 1) * rounds_each, rounds), num_stages=STAGES):
            if EVEN:
                weight, x = tl.load(weight_at + at * INPUTS), tl.load(x_at + at * INPUTS)
            else:
                inside = at * INPUTS + within < inputs
                weight = tl.load(weight_at + at * INPUTS, mask=inside[None], other=0.0)
                x = tl.load(x_at + at * INPUTS, mask=inside[:, None], other=0.0)
            sums = tl.dot(weight, x, sums, input_precision="ieee")
        total += sums
    inside = (output < outputs)[:, None] & (row < rows)[None]
    there = row.to(tl.int64)[None] * outputs + output[:, None]
    if APART:
        out_ptr += tl.program_id(2).to(tl.int64) * rows * outputs
    else:
        bias = 0.0
        row_scale, output_scale = 1.0, 1.0
        if BIAS:
            bias = tl.load(bias_ptr + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
        if SCALED:
            row_scale = tl.load(row_scales + row, mask=row < rows, other=0.0)[None]
            output_scale = tl.load(output_scales + output, mask=output < outputs, other=0.0)[:, None]
        total = _scaled(total, row_scale, output_scale, bias, SCALED, BIAS)
    tl.store(out_ptr + there, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "parts"])
def product_sum_kernel(
    sums_ptr,
    bias_ptr,
    row_scales,
    output_scales,
    out_ptr,
    rows,
    outputs,
    parts,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the parts of BLOCK outputs of one row, in order."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.range(0, parts):
        total += tl.load(sums_ptr + (part * rows + row) * outputs + output, mask=inside, other=0.0)
    bias = 0.0
    row_scale, output_scale = 1.0, 1.0
    if BIAS:
        bias = tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        row_scale = tl.load(row_scales + row)
        output_scale = tl.load(output_scales + output, mask=inside, other=0.0)
    total = _scaled(total, row_scale, output_scale, bias, SCALED, BIAS)
    tl.store(out_ptr + row * outputs + output, total.to(out_ptr.dtype.element_ty), mask=inside)


def parts_of(outputs: int, rounds: int) -> tuple[int, int]:
    """Returns (parts of the sum over the inputs, rounds of each part)."""
    parts = -(-_PROGRAMS // -(-outputs // OUTPUTS))
    each = max(_LEAST_ROUNDS, -(-rounds // parts))
    return -(-rounds // each), each


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
    most_apart: int = MOST_APART,
) -> Tensor:
    """The product of `x`, [rows, inputs], and `weight`, [outputs, inputs], plus `bias`, [outputs], summed in fp32.

    `x` and `weight` have one dtype and a dense last dimension. `scales`: fp32 scales of rows and of outputs, for 8-bit
    floats. Returns [rows, outputs] in `dtype`.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if not rows:
        return out
    depth = DEPTHS[x.element_size()]
    rounds = triton.cdiv(inputs, depth.inputs)
    parts, each = parts_of(outputs, rounds)
    apart = parts > 1 and rows <= most_apart
    target = torch.empty((parts, rows, outputs), dtype=torch.float32, device=x.device) if apart else out
    row_scales, output_scales = (None, None) if scales is None else scales
    product_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(outputs, OUTPUTS), parts if apart else 1)](
        x,
        weight,
        bias,
        row_scales,
        output_scales,
        target,
        rows,
        x.stride(0),
        outputs,
        inputs,
        rounds,
        each,
        parts,
        BIAS=bias is not None,
        SCALED=scales is not None,
        APART=apart,
        EVEN=inputs % depth.inputs == 0,
        ROWS=ROWS,
        OUTPUTS=OUTPUTS,
        INPUTS=depth.inputs,
        STAGES=depth.stages,
        num_warps=8,
    )
    if apart:
        product_sum_kernel[(rows, triton.cdiv(outputs, _SUMMED))](
            target,
            bias,
            row_scales,
            output_scales,
            out,
            rows,
            outputs,
            parts,
            BIAS=bias is not None,
            SCALED=scales is not None,
            BLOCK=_SUMMED,
            num_warps=4,
        )
    return out


def fixed_linear(weight: Tensor, bias: Tensor | None) -> PreparedLinear:
    """A deterministic product. `weight`: [outputs, inputs]; `bias`: [outputs]; both in the activations' dtype."""
    return lambda x: product(x, weight, bias, x.dtype)


def fixed_fp8_linear(weight: Tensor, bias: Tensor | None, quantise: QuantiseRows) -> PreparedLinear:
    """A deterministic `fp8.fp8_linear`: x [rows, inputs] -> bfloat16 [rows, outputs]."""
    values, scales = quantise_plainly(weight)

    def linear(x: Tensor) -> Tensor:
        rows, row_scales = quantise(x)
        return product(rows, values, bias, torch.bfloat16, (row_scales.view(-1), scales.view(-1)))

    return linear
