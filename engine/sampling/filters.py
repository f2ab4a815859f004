"""Top-k and top-p as one threshold a row: what is at least as likely as the last token kept, stays.

A threshold keeps ties together, so that what is kept depends on the row alone and never on the order in which
some device sorts equal values.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Candidates sorted at first on a CPU, where sorting a whole vocabulary takes milliseconds a row.
_HEAD = 256


def thresholds(logits: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int, any_top_p: bool) -> Tensor:
    """fp32 [rows, 1]: the smallest logit of each row that both filters keep.

    `logits` fp32 [rows, vocabulary], already divided by the temperature. `top_k` int64 [rows], 0 keeps all;
    `largest_k` its maximum. `top_p` fp32 [rows], of the distribution that top-k leaves; 1 keeps all.
    """
    if not any_top_p:
        return _top_k(logits.topk(min(largest_k, logits.shape[-1])).values, top_k)
    if logits.device.type != "cpu":
        # Asking whether fewer candidates would do makes the host wait for the device.
        return _both(logits.sort(descending=True).values, logits, top_k, top_p)[0]
    head = logits.topk(min(max(_HEAD, largest_k), logits.shape[-1])).values
    threshold, found = _both(head, logits, top_k, top_p)
    flat = (~found).nonzero().view(-1)
    if len(flat):
        full = logits[flat].sort(descending=True).values
        threshold[flat] = _both(full, logits[flat], top_k[flat], top_p[flat])[0]
    return threshold


def _top_k(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Threshold from `ranked` [rows, candidates], largest first; -inf where top-k is off."""
    place = (top_k - 1).clamp(0, ranked.shape[-1] - 1)
    return ranked.gather(1, place[:, None]).masked_fill(top_k[:, None] == 0, float("-inf"))


def _both(ranked: Tensor, logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(threshold [rows, 1], whether `ranked` went far enough to find it [rows])."""
    by_k = _top_k(ranked, top_k)
    # Ties with the k-th belong to what top-k keeps, also those beyond the end of `ranked`.
    total = logits.masked_fill(logits < by_k, float("-inf")).logsumexp(-1, keepdim=True)
    mass = (ranked - total).exp().cumsum(-1)
    # The first candidate with which the sum reaches p is the last one kept. fp32 sums may end just below 1.
    short = (mass < top_p[:, None]).sum(-1, keepdim=True)
    found = (short.squeeze(-1) < ranked.shape[-1]) | (top_p >= 1)
    by_p = ranked.gather(1, short.clamp(max=ranked.shape[-1] - 1))
    by_p = by_p.masked_fill(top_p[:, None] >= 1, float("-inf"))
    return torch.maximum(by_k, by_p), found
