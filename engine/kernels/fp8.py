"""Products of 8-bit floats (e4m3, arXiv 2209.05433) on the tensor cores of Ada, Hopper and later.

A weight is rounded once, when it is prepared, with one scale for each output; activations are rounded at every product,
with one scale for each row. Products are summed by the tensor cores and scaled in fp32. Against weights in bfloat16
that is half the memory to read, and twice the multiplications a second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.layer import PreparedLinear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
#: The smallest scale is that of this value: a row of zeros must have one, too.
LEAST = 1e-12
#: The first compute capability with tensor cores for 8-bit floats: Ada.
CAPABILITY = (8, 9)
#: `torch._scaled_mm` takes inputs and outputs in multiples of it.
_MULTIPLE = 16

#: [rows, width] -> e4m3 [rows, width up to the next multiple of 16, filled with zeros], fp32 scales [rows, 1].
QuantiseRows = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of `x` so that its largest value becomes the largest there is. See QuantiseRows."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    # What is beyond the largest would become NaN, and a rounding may bring the product there. A number over a tensor
    # would be rounded twice.
    values = (wide * (torch.full_like(largest, LARGEST) / largest)).clamp(-LARGEST, LARGEST).to(FP8)
    return padded(values), largest / LARGEST


def padded(values: Tensor) -> Tensor:
    """e4m3 [rows, width] with zeros up to a width that a product takes."""
    missing = -values.shape[-1] % _MULTIPLE
    return F.pad(values.view(torch.uint8), (0, missing)).view(FP8) if missing else values


def fp8_bytes(weight: Tensor) -> int:
    """What `weight` [outputs, inputs] takes once it is rounded: a byte each, and a scale in fp32 for each output."""
    return weight.numel() + 4 * len(weight)


def multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def fp8_linear(weight: Tensor, bias: Tensor | None, quantise: QuantiseRows = quantise_rows) -> PreparedLinear:
    """x [rows, inputs] -> bfloat16 [rows, outputs]. `weight` [outputs, inputs]; `bias` [outputs], bfloat16.

    `quantise` rounds the activations.
    """
    return fp8_product(len(weight), *quantise_rows(weight), bias, quantise)


def fp8_product(
    outputs: int, values: Tensor, scales: Tensor, bias: Tensor | None, quantise: QuantiseRows = quantise_rows
) -> PreparedLinear:
    """As fp8_linear, of a weight that is rounded already: as QuantiseRows gives it."""
    missing = -outputs % _MULTIPLE
    if missing:
        values = F.pad(values.view(torch.uint8), (0, 0, 0, missing)).view(FP8)
        scales = F.pad(scales, (0, 0, 0, missing), value=1.0)
        bias = None if bias is None else F.pad(bias, (0, missing))
    # Column by column, as the product takes it.
    columns, column_scales = values.t(), scales.t().contiguous()

    def linear(x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty((0, outputs), dtype=torch.bfloat16)
        rows, row_scales = quantise(x)
        out = torch._scaled_mm(
            rows,
            columns,
            scale_a=row_scales,
            scale_b=column_scales,
            bias=bias,
            out_dtype=torch.bfloat16,
            # Sums of 14 bits within the tensor cores: less than what the rounding to 3 bits loses by far.
            use_fast_accum=True,
        )
        return out[:, :outputs].contiguous() if missing else out

    return linear
