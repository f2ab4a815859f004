"""Keys and values of 8 bits in kernels: rounded and read as engine/kernels/compressed_kv.py says, to the bit."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from engine.kernels.fp8 import LARGEST

PLAIN: Final = 0
INT8: Final = 1
FP8: Final = 2
#: By EngineConfig.kv_cache_dtype.
KINDS: Final = {"auto": PLAIN, "int8": INT8, "fp8": FP8}
_INT8 = tl.constexpr(INT8)
_LARGEST = tl.constexpr(LARGEST)
#: Adding and taking it away rounds to an integer, ties to even: 1.5 * 2^23.
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def scale_of(largest):
    """fp32, of the largest size that int8 numbers are to have."""
    return tl.div_rn(tl.where(largest < 1e-30, 1e-30, largest), 127.0)


@triton.jit
def narrow(x, scale, KIND: tl.constexpr):
    """uint8 of fp32; `scale` is for int8 alone."""
    if KIND == _INT8:
        q = tl.div_rn(x, scale)
        q = tl.where(q == q, q, 0.0)
        return ((q + _MAGIC) - _MAGIC).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        # Not by a clamp, which may make a number of what is none.
        bounded = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
        return bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def widen(x, dtype: tl.constexpr, KIND: tl.constexpr):
    """uint8 as the numbers that they stand for, but for int8's scales. Exact in half precision, too."""
    if KIND == _INT8:
        return x.to(tl.int8, bitcast=True).to(dtype)
    else:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def scales_at(pointer):
    """Bytes as the scales that begin there."""
    return pointer.to(tl.pointer_type(tl.float32), bitcast=True)
