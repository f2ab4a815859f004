"""The sampling noise of engine/sampling/noise.py: the same integers to the bit, the same logarithms to rounding."""

from __future__ import annotations

import triton
import triton.language as tl

_ADD = tl.constexpr(0x9E3779B97F4A7C15)
_MULTIPLY_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = tl.constexpr(0x94D049BB133111EB)
_SPREAD = tl.constexpr(0x9E3779B1)
_MIX_1 = tl.constexpr(0x7FEB352D)
_MIX_2 = tl.constexpr(0x846CA68B)
_SCALE = tl.constexpr(2.0**-31 * (1 - 2.0**-23))


@triton.jit
def position_key(low, high, position):
    """The halves (low, high) of a row's key, uint32, from the int32 halves of noise.choice_state and the int64
    position."""
    x = high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = (x ^ position.to(tl.uint64, bitcast=True)) + _ADD
    x = (x ^ (x >> 30)) * _MULTIPLY_1
    x = (x ^ (x >> 27)) * _MULTIPLY_2
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def gumbel(low, high, token):
    """The fp32 Gumbel noise of int32 tokens, for the halves of a key."""
    x = token.to(tl.uint32, bitcast=True) * _SPREAD ^ low
    x = (x ^ (x >> 16)) * _MIX_1
    x = (x ^ (x >> 15)) + high
    x = x * _MIX_2
    x = (x ^ (x >> 16)) * _MIX_1
    x = x ^ (x >> 15)
    u = ((x & 0x7FFFFFFF).to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * _SCALE
    # log1p(-u) by Kahan's formula with log: the quotient corrects the rounding of 1 - u.
    rest = 1.0 - u
    minus_log = tl.where(rest == 1.0, u, tl.log(rest) * u / (rest - 1.0))
    return -tl.log(minus_log)
