"""Products of 8-bit floats (e4m3, arXiv 2209.05433) on the tensor cores of Ada, Hopper and later GPUs.

A weight is rounded once, when it is prepared, with one scale for each output. Activations are rounded at every product,
with one scale for each row. The tensor cores sum the products, which are then scaled in fp32. Compared to weights in
bfloat16 this reads half the memory, and multiplies twice as fast. A single row only needs the first, so its activations
are not rounded where there is a kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.layer import PreparedLinear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
#: The least maximum of a row for its scale, so that a row of zeros has a scale too.
LEAST = 1e-12
#: The first compute capability with tensor cores for 8-bit floats: Ada.
CAPABILITY = (8, 9)
#: `torch._scaled_mm` needs inputs and outputs in multiples of this.
_MULTIPLE = 16

#: A function from [rows, width] to e4m3 [rows, width padded with zeros to a multiple of 16] and fp32 scales [rows, 1].
QuantiseRows = Callable[[Tensor], tuple[Tensor, Tensor]]
#: The product of one row on a GPU: x [1, inputs], e4m3 [outputs, inputs or more], bias, fp32 scales [outputs, 1].
OneRow = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row of `x` so that its largest value becomes the largest e4m3 number. See QuantiseRows."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    # A number beyond the largest would become NaN, and rounding may bring the product there. A division of a scalar by
    # a tensor would round twice.
    values = (wide * (torch.full_like(largest, LARGEST) / largest)).clamp(-LARGEST, LARGEST).to(FP8)
    return padded(values), largest / LARGEST


def padded(values: Tensor) -> Tensor:
    """Pad e4m3 [rows, width] with zeros to a width that a product accepts."""
    missing = -values.shape[-1] % _MULTIPLE
    return F.pad(values.view(torch.uint8), (0, missing)).view(FP8) if missing else values


def fp8_bytes(weight: Tensor) -> int:
    """The bytes of `weight`, [outputs, inputs], after rounding: one for each number and an fp32 scale for each
    output."""
    return weight.numel() + 4 * len(weight)


def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def fp8_linear(
    weight: Tensor, bias: Tensor | None, quantise: QuantiseRows = quantise_rows, one_row: OneRow | None = None
) -> PreparedLinear:
    """A product x [rows, inputs] -> bfloat16 [rows, outputs].

    `weight`: [outputs, inputs]. `bias`: [outputs], bfloat16. `quantise`: rounds the activations. `one_row`: multiplies
    a single row of them, without rounding it.
    """
    return fp8_product(len(weight), *quantise_rows(weight), bias, quantise, one_row)


def fp8_product(
    outputs: int,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    quantise: QuantiseRows = quantise_rows,
    one_row: OneRow | None = None,
) -> PreparedLinear:
    """Like fp8_linear, for a weight that is already rounded, in the form of QuantiseRows."""
    missing = -outputs % _MULTIPLE
    if missing:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        scales = F.pad(scales, (0, 0, 0, missing), value=1.0)
        bias = None if bias is None else F.pad(bias, (0, missing))
    # In column-major order, as the product needs it.
    columns, column_scales = values.t(), scales.t().contiguous()

    def linear(x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty((0, outputs), dtype=torch.bfloat16)
        if one_row is not None and len(x) == 1 and x.device.type != "cpu":
            return one_row(x, values[:outputs], bias, scales)
        rows, row_scales = quantise(x)
        out = torch._scaled_mm(
            rows,
            columns,
            scale_a=row_scales,
            scale_b=column_scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            # The tensor cores sum in 14 bits, which loses far less than the rounding to 3 bits.
            use_fast_accum=True,
        )
        return out[:, :outputs].contiguous() if missing else out

    return linear
