"""What models of some shapes launch besides attention, on tensors that take no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.triton.attention.rope_kv import rope_and_write
from engine.kernels.triton.products.quantised import MOST_ROWS, int4_linear, int8_linear
from engine.kernels.triton.rowwise import add_rms_norm, gelu_tanh_mul, norm_heads, quantise_rows, rms_norm, silu_mul

Launch = Callable[[], None]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _layer(
    width: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rotary_dim: int | None = None,
    gated: Callable[[Tensor], Tensor] = silu_mul,
    norm_dtype: torch.dtype = torch.bfloat16,
    head_norms: bool = False,
) -> Launch:
    def launch() -> None:
        for tokens in (1, 60):  # compiled once for both
            x, weight = empty(tokens, width), empty(width, dtype=norm_dtype)
            rms_norm(x, weight, 1e-5)
            add_rms_norm(x, empty(tokens, width), weight, 1e-5)
            gated(empty(tokens, 2 * hidden))
            packed = empty(tokens, heads + 2 * kv_heads, head_dim)
            if head_norms:
                norm_heads(packed, *empty(2, head_dim, dtype=norm_dtype), kv_heads, 1e-6)
            angles = empty(tokens, 1, rotary_dim or head_dim)
            cache = empty(2, 1000, 16, kv_heads, head_dim)
            rope_and_write(packed, angles, angles, cache, empty(tokens + 1, dtype=torch.int64)[tokens % 2 :][:tokens])
            quantise_rows(x)
            quantise_rows(empty(tokens, hidden))

    return launch


LAYERS: dict[str, Launch] = {
    "llama-3.1-8b": _layer(4096, 14336, 32, 8, 128),
    "tiny": _layer(64, 96, 4, 2, 16),
    "phi-4-mini": _layer(3072, 8192, 24, 8, 128, rotary_dim=96),
    "gemma-3-27b": _layer(5376, 21504, 32, 16, 128, gated=gelu_tanh_mul, norm_dtype=torch.float32, head_norms=True),
}


def _products(weight: Int4Weight | Int8Weight, *, biased: bool = False) -> Launch:
    """Of every number of rows that has a kernel of its own."""

    def launch() -> None:
        moved = {field.name: getattr(weight, field.name) for field in fields(weight)}
        here = type(weight)(**{name: one.to("meta") if isinstance(one, Tensor) else one for name, one in moved.items()})
        bias = empty(weight.shape[0]) if biased else None
        product = int4_linear(here, bias) if isinstance(here, Int4Weight) else int8_linear(here, bias)
        for rows in (1, 17, MOST_ROWS, MOST_ROWS + 1):
            product(empty(rows, weight.shape[1]))

    return launch


#: Sums over 1024 inputs are split, those over 512 are not.
_LONG, _SHORT = torch.ones(256, 1024, dtype=torch.bfloat16), torch.ones(256, 512, dtype=torch.bfloat16)
PRODUCTS: dict[str, Launch] = {
    "int4": _products(Int4Weight.quantise(_LONG, 128)),
    "int4 with zeros": _products(Int4Weight.quantise(_LONG, 128, symmetric=False)),
    "int4 in small groups": _products(Int4Weight.quantise(_SHORT, 32, symmetric=False), biased=True),
    "int8": _products(Int8Weight.quantise(_LONG)),
    "int8 in groups": _products(Int8Weight.quantise(_SHORT, 128), biased=True),
}
