"""Keys and values of 8 bits each: how they lie in the cache of every set, and the sets that widen them by torch.

Each key and each value of a head is rounded by itself when it is written, and is as wide again when it is gathered.
"int8": -127 to 127 times one scale, which lies behind the numbers as fp32; "fp8": e4m3 as it is, no scale, as its
exponent covers what keys and values are. The cache is bytes in both.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.kernels.deterministic import DeterministicCpu
from engine.kernels.fallback.cpu import Cpu
from engine.kernels.fp8 import FP8, LARGEST

#: Of "int8": what lies behind each key and each value.
SCALE_BYTES: Final = 4


class _Compressed(Cpu):
    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        super().write_kv(self._narrow(key), self._narrow(value), cache, slots)

    def gather(self, cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().gather(cache, tables)
        return self._widen(keys), self._widen(values)

    def _narrow(self, x: Tensor) -> Tensor:
        """uint8 [tokens, kv_heads, cache_width] of [tokens, kv_heads, head_dim]."""
        raise NotImplementedError

    def _widen(self, packed: Tensor) -> Tensor:
        raise NotImplementedError


class Int8Kv(_Compressed):
    name = "cpu-int8-kv"

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__(compute_dtype)
        self.cache_dtype = torch.uint8

    def cache_width(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    def _narrow(self, x: Tensor) -> Tensor:
        wide = x.float()
        # A vector of zeros has any scale; what is no number makes one that is none.
        scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        q = (wide / scales).round().nan_to_num(0.0).to(torch.int8)
        return torch.cat((q.view(torch.uint8), scales.view(torch.uint8)), -1)

    def _widen(self, packed: Tensor) -> Tensor:
        q = packed[..., :-SCALE_BYTES].view(torch.int8)
        scales = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
        return (q * scales).to(self.compute_dtype)


class Fp8Kv(_Compressed):
    name = "cpu-fp8-kv"

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__(compute_dtype)
        self.cache_dtype = torch.uint8

    def _narrow(self, x: Tensor) -> Tensor:
        return x.float().clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)

    def _widen(self, packed: Tensor) -> Tensor:
        return packed.view(FP8).to(self.compute_dtype)


class DeterministicInt8Kv(Int8Kv, DeterministicCpu):
    name = "cpu-int8-kv-deterministic"


class DeterministicFp8Kv(Fp8Kv, DeterministicCpu):
    name = "cpu-fp8-kv-deterministic"


#: (kv_cache_dtype, deterministic) -> the set
COMPRESSED: Final[dict[tuple[str, bool], type[Cpu]]] = {
    ("int8", False): Int8Kv,
    ("int8", True): DeterministicInt8Kv,
    ("fp8", False): Fp8Kv,
    ("fp8", True): DeterministicFp8Kv,
}
