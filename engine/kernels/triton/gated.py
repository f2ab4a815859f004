"""Computes activation(gate) * up of packed rows. Each element is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The columns of one row per program of 4 warps: each thread handles 16 bytes of bf16 of gate and of up.
BLOCK = 1024
WARPS = 4
#: sqrt(2 / pi), and the cubic term of the tanh approximation (arXiv 1606.08415).
_SLOPE: tl.constexpr = tl.constexpr(0.7978845608028654)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, row_stride, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = gate_up_ptr + row * row_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    # GELU: (1 + tanh(u)) / 2 is sigmoid(2 u), which needs one exponential and no tanh.
    slope = 2 * _SLOPE * gate * (1 + _CUBIC * gate * gate) if GELU else gate
    activated = (gate / (1 + tl.exp(-slope))).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + column, (activated.to(tl.float32) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`Reference.silu_mul`: [rows, 2 * width], the last dimension dense, -> [rows, width]."""
    return _gated(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """`Reference.gelu_tanh_mul`: [rows, 2 * width], the last dimension dense, -> [rows, width]."""
    return _gated(gate_up, gelu=True)


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        gated_kernel[grid](gate_up, out, gate_up.stride(0), WIDTH=width, GELU=gelu, BLOCK=BLOCK, num_warps=WARPS)
    return out
