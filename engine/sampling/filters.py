"""Top-k, top-p and min-p as one floor a row: what is at least as likely as the least likely token kept, stays.

A floor keeps ties together, so that what is kept depends on the row alone and never on the order in which some device
sorts equal values. Typical sampling keeps a band instead: it takes the rest out of the logits themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Candidates sorted at first on a CPU, where sorting a whole vocabulary takes milliseconds a row.
_HEAD = 256
_NONE = float("-inf")


@dataclass(frozen=True, slots=True)
class Ranked:
    """The rows with top-k or top-p."""

    rows: Tensor | None
    """int64 [ranked]; None where that is all rows."""
    top_k: Tensor
    """int64 [ranked]; 0 keeps all."""
    top_p: Tensor
    """fp32 [ranked], of the distribution that top-k leaves; 1 keeps all."""
    largest_k: int
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Filters:
    """Those of a step's drawn rows. None stands for: no row wants it."""

    ranked: Ranked | None = None
    min_p: Tensor | None = None
    """fp32 [rows, 1]: its logarithm; -inf keeps all."""
    typical: tuple[Tensor, Tensor] | None = None
    """(int64 rows, fp32 [rows, 1] sum of probabilities to keep)."""


def narrow(logits: Tensor, filters: Filters) -> Tensor | None:
    """The smallest logit of each row that is kept, fp32 [rows, 1]; None where nothing limits them.

    `logits` fp32 [rows, vocabulary], already divided by the temperature; typical sampling changes them in place.
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
        # A share of the largest probability is a distance from the largest logit, whatever else is kept.
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
    """fp32 [rows, 1]: the smallest logit of each of the ranked rows that top-k and top-p keep."""
    top_k, top_p = ranked.top_k, ranked.top_p
    if not ranked.any_top_p:
        return _top_k(logits.topk(min(ranked.largest_k, logits.shape[-1])).values, top_k)
    if logits.device.type != "cpu":
        # Asking whether fewer candidates would do makes the host wait for the device.
        return _both(logits.sort(descending=True).values, logits, top_k, top_p)[0]
    head = logits.topk(min(max(_HEAD, ranked.largest_k), logits.shape[-1])).values
    threshold, found = _both(head, logits, top_k, top_p)
    flat = (~found).nonzero().view(-1)
    if len(flat):
        full = logits[flat].sort(descending=True).values
        threshold[flat] = _both(full, logits[flat], top_k[flat], top_p[flat])[0]
    return threshold


def _top_k(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Threshold from `ranked` [rows, candidates], largest first; -inf where top-k is off."""
    place = (top_k - 1).clamp(0, ranked.shape[-1] - 1)
    return ranked.gather(1, place[:, None]).masked_fill(top_k[:, None] == 0, _NONE)


def _both(ranked: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(threshold [rows, 1], whether `ranked` went far enough to find it [rows])."""
    by_k = _top_k(ranked, top_k)
    # Ties with the k-th belong to what top-k keeps, also those beyond the end of `ranked`.
    peak = logits.amax(-1, keepdim=True)
    total = peak + _row_sums((logits - peak).masked_fill_(logits < by_k, _NONE).exp_()).log_()
    mass = (ranked - total).exp().cumsum(-1)
    # The first candidate with which the sum reaches p is the last one kept. fp32 sums may end just below 1.
    short = (mass < top_p[:, None]).sum(-1, keepdim=True)
    found = (short.squeeze(-1) < ranked.shape[-1]) | (top_p >= 1)
    by_p = ranked.gather(1, short.clamp(max=ranked.shape[-1] - 1))
    by_p = by_p.masked_fill(top_p[:, None] >= 1, _NONE)
    return torch.maximum(by_k, by_p), found


def typical(logits: Tensor, mass: Tensor) -> Tensor:
    """bool, shaped like `logits` [rows, vocabulary]: the tokens whose surprise is nearest to the entropy, as few as
    have `mass` [rows, 1] of the probability together (arXiv 2202.00666). -inf logits are of no token."""
    said = logits.log_softmax(-1)
    chances = said.exp()
    entropy = -_row_sums(torch.where(chances > 0, chances * said, 0.0))
    strangeness = (said + entropy).abs()
    # On a CPU finding the nearest few is faster than sorting all, and nearly always enough.
    count = logits.shape[-1]
    head = min(_HEAD, count) if logits.device.type == "cpu" else count
    most, found = _most_strange(*strangeness.topk(head, largest=False), chances, mass)
    if head < count and not bool(found.all()):
        flat = (~found).nonzero().view(-1)
        most[flat] = _most_strange(*strangeness[flat].sort(), chances[flat], mass[flat])[0]
    return (strangeness <= most) & (chances > 0)


def _most_strange(nearest: Tensor, place: Tensor, chances: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """(strangeness of the last token kept [rows, 1], whether `nearest` went far enough to have the mass [rows])."""
    sums = chances.gather(1, place).cumsum(-1)
    short = (sums < mass).sum(-1, keepdim=True)
    last = nearest.shape[-1]
    return nearest.gather(1, short.clamp(max=last - 1)), short.squeeze(-1) < last


def _row_sums(x: Tensor) -> Tensor:
    """Over the last dimension, which stays. Of a single long row torch makes one sum in each thread, of several rows
    one sum each: as several, so that a row's sum does not depend on whether there are others."""
    return x.sum(-1, keepdim=True) if len(x) > 1 else x.expand(2, -1).sum(-1, keepdim=True)[:1]
