"""Keys and values of 8 bits in plain torch: the oracle of the sets that store them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.fp8 import FP8, LARGEST
from engine.kernels.reference import SCALE_BYTES

KINDS = ("int8", "fp8")


def width(kind: str, head_dim: int) -> int:
    """The bytes of a key of `head_dim` numbers."""
    return head_dim + SCALE_BYTES * (kind == "int8")


def narrow(x: Tensor, kind: str) -> Tensor:
    """Round `x`, [..., head_dim], to bytes, uint8 [..., width]."""
    wide = x.float()
    if kind == "fp8":
        return wide.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
    # A vector of zeros may have any scale. NaN inputs give NaN scales.
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    q = (wide / scales).round().nan_to_num(0.0).to(torch.int8)
    return torch.cat((q.view(torch.uint8), scales.view(torch.uint8)), -1)


def widen(packed: Tensor, kind: str) -> Tensor:
    """The numbers that `narrow` stored, fp32."""
    if kind == "fp8":
        return packed.view(FP8).float()
    return packed[..., :-SCALE_BYTES].view(torch.int8) * packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def write(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, kind: str) -> None:
    """Write `key` and `value`, [tokens, kv_heads, head_dim], at `slots` of one layer's cache of bytes."""
    flat = cache.view(2, -1, *cache.shape[3:])
    flat[0].index_copy_(0, slots, narrow(key, kind))
    flat[1].index_copy_(0, slots, narrow(value, kind))
