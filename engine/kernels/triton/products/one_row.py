"""The product of one row, as a single sequence decodes. It takes about as long as reading the weight.

cuBLAS pads the row to a tile of 8, and divides the sums of narrow matrices, whose parts a second launch adds. Here each
program reads the weights of one output from end to end, and many programs keep a multiprocessor's memory busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The bytes of weights in a round, and the warps that read them: 16 bytes for each thread. Within 1% of the best of
#: some 25 sizes that were measured on an H200 in bf16, for Llama 3.1 8B (docs/notes/gpu-limits.md).
ROUND_BYTES, WARPS = 4096, 8


@triton.jit
def one_row_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    INPUTS: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ROUND: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, ROUND)
    weight_ptr += output * STRIDE
    sums = tl.zeros([ROUND], tl.float32)
    for at in tl.range(0, INPUTS, ROUND):
        if INPUTS % ROUND == 0:
            x, weight = tl.load(x_ptr + at + column), tl.load(weight_ptr + at + column)
        else:
            inside = at + column < INPUTS
            x = tl.load(x_ptr + at + column, inside, other=0.0)
            weight = tl.load(weight_ptr + at + column, inside, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)
    total = tl.sum(sums, 0)
    if SCALED:
        total *= tl.load(scale_ptr + output)
    if BIAS:
        total += tl.load(bias_ptr + output).to(tl.float32)
    tl.store(out_ptr + output, total.to(out_ptr.dtype.element_ty))


def one_row_product(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None) -> Tensor:
    """`x`: [1, inputs], dense. `weight`: [outputs, inputs] with dense rows, which may be wider and in e4m3. `bias`:
    [outputs]. `scales`: fp32 [outputs, 1], for the weights of each output. Returns [1, outputs], as `x`; sums are fp32.
    """
    outputs = len(weight)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    one_row_kernel[(outputs,)](
        x,
        weight,
        x if scales is None else scales,
        x if bias is None else bias,
        out,
        INPUTS=x.shape[1],
        STRIDE=weight.stride(0),
        SCALED=scales is not None,
        BIAS=bias is not None,
        ROUND=ROUND_BYTES // weight.element_size(),
        num_warps=WARPS,
    )
    return out
