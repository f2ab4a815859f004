"""Device functions for an 8-bit KV cache. They round and widen as engine/kernels/reference.py does, to the bit."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from engine.kernels.fp8 import LARGEST

PLAIN: Final = 0
INT8: Final = 1
FP8: Final = 2
#: The kinds by EngineConfig.kv_cache_dtype.
KINDS: Final = {"auto": PLAIN, "int8": INT8, "fp8": FP8}
_INT8 = tl.constexpr(INT8)
_LARGEST = tl.constexpr(LARGEST)
#: 1.5 * 2^23. Adding and subtracting it rounds to an integer, ties to even.
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def scale_of(largest):
    """The fp32 scale of int8 numbers whose largest absolute value is `largest`."""
    return tl.div_rn(tl.where(largest < 1e-30, 1e-30, largest), 127.0)


@triton.jit
def narrow(x, scale, KIND: tl.constexpr):
    """Round fp32 to 8 bits, as uint8. `scale` is only used for int8."""
    if KIND == _INT8:
        q = tl.div_rn(x, scale)
        q = tl.where(q == q, q, 0.0)
        return ((q + _MAGIC) - _MAGIC).to(tl.int8).to(tl.uint8, bitcast=True)
    else:
        # Not a clamp, which may turn NaN into a number.
        bounded = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))
        return bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def widen(x, dtype: tl.constexpr, KIND: tl.constexpr):
    """The numbers stored as uint8, without int8's scales. Exact in half precision, too."""
    if KIND == _INT8:
        return x.to(tl.int8, bitcast=True).to(dtype)
    else:
        return x.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def scales_at(pointer):
    """A byte pointer as a pointer to fp32 scales."""
    return pointer.to(tl.pointer_type(tl.float32), bitcast=True)
