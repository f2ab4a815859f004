"""KV caches of 8 bits: their layout in every kernel set, and the sets that widen them with torch.

Each key and each value of a head is rounded by itself when it is written, and widened when it is gathered. "int8" has
numbers from -127 to 127 and one scale, stored after them as fp32. "fp8" is plain e4m3 without a scale, because its
exponent covers the range of keys and values. Both caches are bytes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.kernels.deterministic import DeterministicCpu
from engine.kernels.fallback.cpu import Cpu
from engine.kernels.fp8 import FP8, LARGEST

#: The bytes of the scale after each key and each value, for "int8".
SCALE_BYTES: Final = 4


class _Compressed(Cpu):
    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        super().write_kv(self._narrow(key), self._narrow(value), cache, slots)

    def gather(self, cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().gather(cache, tables)
        return self._widen(keys), self._widen(values)

    def _narrow(self, x: Tensor) -> Tensor:
        """Round keys or values [tokens, kv_heads, head_dim] to bytes, uint8 [tokens, kv_heads, cache_width]."""
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
        # A vector of zeros may have any scale. NaN inputs give NaN scales.
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


#: The sets by (kv_cache_dtype, deterministic).
COMPRESSED: Final[dict[tuple[str, bool], type[Cpu]]] = {
    ("int8", False): Int8Kv,
    ("int8", True): DeterministicInt8Kv,
    ("fp8", False): Fp8Kv,
    ("fp8", True): DeterministicFp8Kv,
}
