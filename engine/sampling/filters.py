"""Sampling filters. Top-k, top-p and min-p become one threshold for each row: the smallest logit that is kept.

A threshold keeps or drops ties together. So the kept tokens depend on the row alone, never on the order in which a
device sorts equal values. Typical sampling keeps a band of tokens instead, and sets the logits of the others to -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
