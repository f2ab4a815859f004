"""Kernels that compute each row by itself: norms, gates, and rounding to 8-bit floats.

RMSNorm is over the last dimension, alone or of a residual sum; gates are activation(gate) * up of packed rows. Each
row, or element, is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import fp8

#: The widest rows. Wider ones do not fit into the registers of one program.
WIDEST = 32768
#: The elements of a program for narrow rows (norms of single heads): twice 16 bytes of bf16 in each thread.
_TILE = 2048
_NARROW = 1024
#: The columns of one row per program of 4 warps: each thread handles 16 bytes of bf16 of gate and of up.
BLOCK = 1024
WARPS = 4
#: sqrt(2 / pi), and the cubic term of the tanh approximation (arXiv 1606.08415).
_SLOPE: tl.constexpr = tl.constexpr(0.7978845608028654)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_LARGEST: tl.constexpr = tl.constexpr(fp8.LARGEST)
_LEAST: tl.constexpr = tl.constexpr(fp8.LEAST)


@triton.jit
def _factor(square):
    """1 / sqrt(square); NaN, not 0, of what overflowed."""
    return tl.where(square < float("inf"), tl.rsqrt(square), float("nan"))


@triton.jit
def _normed(x, weight, eps, WIDTH: tl.constexpr):
    """The norm of rows `x`, fp32 [rows, block], zero beyond their width. Returns the dtype of `weight`, [rows or 1,
    block]."""
    normed = x * _factor(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    # Rounded to the weight's dtype before the product with it, as models are trained.
    return (normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    inner,
    outer_stride,
    inner_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row r of `x` begins at r // inner * outer_stride + r % inner * inner_stride; `out` is contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None]
    start = (row // inner).to(tl.int64) * outer_stride + row % inner * inner_stride
    x = tl.load(x_ptr + start[:, None] + column[None], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    out = out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None]
    tl.store(out, _normed(x, weight[None], eps, WIDTH).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_heads_kernel(
    heads_ptr,
    query_weight_ptr,
    key_weight_ptr,
    rows,
    token_stride,
    head_stride,
    eps,
    QUERY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Norm queries and keys in place. Row r is head r % HEADS, a query or a key, of token r // HEADS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    head = row % HEADS
    inside = (row < rows)[:, None] & (column < WIDTH)[None]
    start = (row // HEADS).to(tl.int64) * token_stride + head * head_stride
    at = heads_ptr + start[:, None] + column[None]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    query_weight = tl.load(query_weight_ptr + column, mask=column < WIDTH, other=0.0)
    key_weight = tl.load(key_weight_ptr + column, mask=column < WIDTH, other=0.0)
    weight = tl.where((head < QUERY_HEADS)[:, None], query_weight[None], key_weight[None])
    tl.store(at, _normed(x, weight, eps, WIDTH).to(heads_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, x_stride, residual_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each row. The sum overwrites the residual, and its norm overwrites `x`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x_at, residual_at = x_ptr + row * x_stride + column, residual_ptr + row * residual_stride + column
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    total = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_at, total, mask=inside)
    # The norm is that of the rounded sum, as it is stored.
    wide = total.to(tl.float32)
    normed = wide * _factor(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = normed.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(x_at, scaled.to(weight.dtype).to(x_ptr.dtype.element_ty), mask=inside)


def row_warps(block: int) -> int:
    """The warps of a program that holds one row of `block` elements: 16 to 32 elements for each thread."""
    return max(1, min(32, block // 512))


def narrow_rows(block: int) -> int:
    """The number of rows of one program."""
    return max(1, _TILE // block) if block <= _NARROW else 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Reference.rms_norm`, with the same order of roundings. Returns the shape of `x`.

    `x`: [..., width], of two or three dimensions, the last one dense. `weight`: [width]. `width` is at most WIDEST.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    rows = x.numel() // width
    if not rows:
        return out
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    block = triton.next_power_of_2(width)
    rows_each = narrow_rows(block)
    rms_norm_kernel[(triton.cdiv(rows, rows_each),)](
        x,
        weight,
        out,
        rows,
        inner,
        x.stride(0),
        inner_stride,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows_each,
        num_warps=row_warps(block * rows_each),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`Reference.add_rms_norm`, with the same order of roundings. `width` is at most WIDEST.

    Returns (norm of the sum, the sum), both [rows, width], written over `x` and `residual`.
    """
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        add_rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            x.stride(0),
            residual.stride(0),
            eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return x, residual


def norm_heads(heads: Tensor, query_weight: Tensor, key_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
    """`Reference.norm_heads`, in place. `heads`: the last dimension dense. Returns it."""
    tokens, count, head_dim = heads.shape
    rows = tokens * (count - kv_heads)
    if rows:
        block = triton.next_power_of_2(head_dim)
        rows_each = narrow_rows(block)
        norm_heads_kernel[(triton.cdiv(rows, rows_each),)](
            heads,
            query_weight,
            key_weight,
            rows,
            heads.stride(0),
            heads.stride(1),
            eps,
            QUERY_HEADS=count - 2 * kv_heads,
            HEADS=count - kv_heads,
            WIDTH=head_dim,
            BLOCK=block,
            ROWS=rows_each,
            num_warps=row_warps(block * rows_each),
        )
    return heads


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
    """`fp8.quantise_rows`, to the bit: largest value, scale and rounding in one pass. `x`: [rows, width], the last
    dimension dense.
    """
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
