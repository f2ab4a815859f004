"""Draws a token from edited logits: filters keep some of them, and noise chooses one.

**Filters.** Sampling filters. Top-k, top-p and min-p become one threshold for each row: the smallest logit that is
kept.

A threshold keeps or drops ties together. So the kept tokens depend on the row alone, never on the order in which a
device sorts equal values. Typical sampling keeps a band of tokens instead, and sets the logits of the others to -inf.

**Noise.** Stateless Gumbel noise: argmax(logits + noise) is a sample of softmax(logits) (Gumbel-max trick).

A hash replaces a generator's state. So a sequence that was preempted, or resumed on another worker, samples the same
tokens, whatever the rest of the batch. The integer part is exact and the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: The number of candidates sorted at first on a CPU, where sorting a whole vocabulary takes milliseconds a row.
_HEAD = 256
_NONE = float("-inf")


@dataclass(frozen=True, slots=True)
class Ranked:
    """The parameters of the rows with top-k or top-p."""

    rows: Tensor | None
    """int64 [ranked]; None if that is all rows."""
    top_k: Tensor
    """int64 [ranked]; 0 keeps all."""
    top_p: Tensor
    """fp32 [ranked], applied to the distribution that top-k leaves; 1 keeps all."""
    largest_k: int
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of the rows that a step draws. A field is None if no row needs it."""

    ranked: Ranked | None = None
    min_p: Tensor | None = None
    """fp32 [rows, 1]: the logarithm of min_p; -inf keeps all."""
    typical: tuple[Tensor, Tensor] | None = None
    """(rows, int64; sum of probabilities to keep, fp32 [rows, 1])."""


def narrow(logits: Tensor, filters: Filters) -> Tensor | None:
    """The smallest logit that is kept of each row, fp32 [rows, 1]. None if no row has a limit.

    `logits`: fp32 [rows, vocabulary], already scaled. Typical sampling changes them in place.
    """
    floor = None
    if filters.ranked is not None:
        rows = filters.ranked.rows
        if rows is None:
            floor = thresholds(logits, filters.ranked)
        else:
            floor = logits.new_full((len(logits), 1), _NONE)
            floor[rows] = thresholds(logits[rows], filters.ranked)
    if filters.min_p is not None:
        # A fraction of the largest probability is a distance from the largest logit, whatever the other filters keep.
        least = logits.amax(-1, keepdim=True) + filters.min_p
        floor = least if floor is None else torch.maximum(floor, least)
    if filters.typical is not None:
        rows, mass = filters.typical
        some = logits[rows]
        if floor is not None:
            some = some.masked_fill(some < floor[rows], _NONE)
        logits[rows] = some.masked_fill_(~typical(some, mass), _NONE)
    return floor


def thresholds(logits: Tensor, ranked: Ranked) -> Tensor:
    """The smallest logit that top-k and top-p keep of each ranked row, fp32 [rows, 1]."""
    top_k, top_p = ranked.top_k, ranked.top_p
    if not ranked.any_top_p:
        return _top_k(logits.topk(min(ranked.largest_k, logits.shape[-1])).values, top_k)
    if logits.device.type != "cpu":
        # Checking whether fewer candidates suffice would make the host wait for the device.
        return _both(logits.sort(descending=True).values, logits, top_k, top_p)[0]
    head = logits.topk(min(max(_HEAD, ranked.largest_k), logits.shape[-1])).values
    threshold, enough = _both(head, logits, top_k, top_p)
    flat = (~enough).nonzero().view(-1)
    if len(flat):
        full = logits[flat].sort(descending=True).values
        threshold[flat] = _both(full, logits[flat], top_k[flat], top_p[flat])[0]
    return threshold


def _top_k(ranked: Tensor, top_k: Tensor) -> Tensor:
    """The top-k threshold from `ranked`, [rows, candidates], largest first. -inf for rows without top-k."""
    index = (top_k - 1).clamp(0, ranked.shape[-1] - 1)
    return ranked.gather(1, index[:, None]).masked_fill(top_k[:, None] == 0, _NONE)


def _both(ranked: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (threshold [rows, 1], whether `ranked` had enough candidates to find it [rows])."""
    by_k = _top_k(ranked, top_k)
    # Top-k keeps ties with the k-th token, including those beyond the end of `ranked`.
    peak = logits.amax(-1, keepdim=True)
    total = peak + _row_sums((logits - peak).masked_fill_(logits < by_k, _NONE).exp_()).log_()
    mass = (ranked - total).exp().cumsum(-1)
    # The last candidate kept is the first with which the sum reaches p. fp32 sums may end just below 1.
    short = (mass < top_p[:, None]).sum(-1, keepdim=True)
    enough = (short.squeeze(-1) < ranked.shape[-1]) | (top_p >= 1)
    by_p = ranked.gather(1, short.clamp(max=ranked.shape[-1] - 1))
    by_p = by_p.masked_fill(top_p[:, None] >= 1, _NONE)
    return torch.maximum(by_k, by_p), enough


def typical(logits: Tensor, mass: Tensor) -> Tensor:
    """The tokens that typical sampling keeps, bool, shaped like `logits` [rows, vocabulary] (arXiv 2202.00666).

    These are the tokens whose surprise is nearest to the entropy, as few as together have `mass`, [rows, 1], of the
    probability. Tokens with -inf logits are not kept.
    """
    log_probs = logits.log_softmax(-1)
    chances = log_probs.exp()
    entropy = -_row_sums(torch.where(chances > 0, chances * log_probs, 0.0))
    strangeness = (log_probs + entropy).abs()
    # On a CPU, finding the nearest few is faster than sorting all, and is nearly always enough.
    count = logits.shape[-1]
    head = min(_HEAD, count) if logits.device.type == "cpu" else count
    limit, enough = _most_strange(*strangeness.topk(head, largest=False), chances, mass)
    if head < count and not bool(enough.all()):
        flat = (~enough).nonzero().view(-1)
        limit[flat] = _most_strange(*strangeness[flat].sort(), chances[flat], mass[flat])[0]
    return (strangeness <= limit) & (chances > 0)


def _most_strange(nearest: Tensor, order: Tensor, chances: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (strangeness of the last token kept [rows, 1], whether `nearest` had enough tokens for the mass
    [rows])."""
    sums = chances.gather(1, order).cumsum(-1)
    short = (sums < mass).sum(-1, keepdim=True)
    last = nearest.shape[-1]
    return nearest.gather(1, short.clamp(max=last - 1)), short.squeeze(-1) < last


def _row_sums(x: Tensor) -> Tensor:
    """Sums over the last dimension, which is kept. torch splits the sum of a single long row among threads, but sums
    each of several rows in one thread. So a single row is doubled here, and its sum does not depend on other rows."""
    return x.sum(-1, keepdim=True) if len(x) > 1 else x.expand(2, -1).sum(-1, keepdim=True)[:1]


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
