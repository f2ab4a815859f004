"""Stateless Gumbel noise: argmax(logits + noise) is a sample of softmax(logits) (Gumbel-max trick).

A hash replaces a generator's state. So a sequence that was preempted, or resumed on another worker, samples the same
tokens, whatever the rest of the batch. The integer part is exact and the same on every device.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The constants of SplitMix64. All have the highest bit set.
_ADD, _MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: Spreads neighbouring token ids (2^32 / golden ratio). It is odd, and far from small multiples of a power of two.
_SPREAD = 0x9E3779B1 - (1 << 32)
# Multipliers of "lowbias32" by Chris Wellons (hash-prospector, public domain), as signed int32.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)
# 31 bits give u in (0, 1): (bits + 1/2) * 2^-31, scaled down by 2^-23 so that the largest still rounds below 1.
_SCALE = 2.0**-31 * (1 - 2.0**-23)
#: Noise is in [-2.78, 22.3], so a logit this far below the largest can never win.
REACH = 25.1


def row_keys(
    seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64]
) -> NDArray[np.int32]:
    """The keys for `gumbel`, int32 [rows, 2]. `positions` counts from the prompt's first token."""
    state = _splitmix64(choice_state(seeds, choices) ^ positions)
    return state.view(np.int32).reshape(-1, 2)


def choice_state(seeds: NDArray[np.uint64], choices: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The part of the keys that all positions of a choice have in common."""
    return _splitmix64(_splitmix64(seeds) ^ choices)


def position_keys(state: Tensor, positions: Tensor) -> Tensor:
    """`row_keys` on any device: int32 [rows, 2], from int64 [rows] of `choice_state` and positions.

    int64 products wrap. The right shift of int64 copies the sign, which is masked away.
    """
    x = (state ^ positions) + _signed(_ADD)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MULTIPLY_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MULTIPLY_2)
    return (x ^ ((x >> 31) & ((1 << 33) - 1))).view(torch.int32).view(-1, 2)


def _signed(x: int) -> int:
    return x - (1 << 64)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64 bits."""
    x = x + np.uint64(_ADD)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    return x ^ (x >> np.uint64(31))


def bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """An int32 hash of (key, token). `keys`: int32 [..., 2]. `tokens`: int32, broadcast against keys[..., 0].

    It is lowbias32 of the token, keyed before and in between. int32 products wrap.
    """
    x = (tokens * _SPREAD) ^ keys[..., 0]
    spare = torch.empty_like(x)
    _fold(x, 16, spare)
    x *= _MIX_1
    _fold(x, 15, spare)
    x += keys[..., 1]
    x *= _MIX_2
    _fold(x, 16, spare)
    x *= _MIX_1
    _fold(x, 15, spare)
    return x


def _fold(x: Tensor, shift: int, spare: Tensor) -> None:
    """x ^= x >> shift, as a logical shift. All calls share one spare tensor, because fresh memory costs more than the
    arithmetic."""
    torch.bitwise_right_shift(x, shift, out=spare)
    spare &= (1 << (32 - shift)) - 1
    x ^= spare


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, fp32, shaped like `bits(keys, tokens)`.

    It is -log(-log1p(-u)): the large values, which decide, come from small u, where floating point resolves finely.
    """
    positive = bits(keys, tokens).bitwise_and_(0x7FFFFFFF)
    u = positive.to(torch.float32).add_(0.5).mul_(_SCALE)
    return u.neg_().log1p_().neg_().log_().neg_()
