"""Measures how far a model's next-token distributions are from those of another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.quant.make.walk import hidden

#: The number of rows whose logits are made together, and of rows that are judged while they are in a processor's cache.
_ROWS, _TOGETHER = 128, 8


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares a quantised model (q) with its original (p), over all tokens of a text but the first of each window."""

    tokens: int
    perplexity_before: float
    perplexity: float
    divergence: float
    """The mean of KL(p || q), in nats."""
    divergence_p99: float
    agreement: float
    """The fraction of positions where both have the same most likely token."""

    @property
    def increase(self) -> float:
        """The relative increase of perplexity: 0.01 is one percent."""
        return self.perplexity / self.perplexity_before - 1

    def to_json(self) -> dict[str, float]:
        return asdict(self) | {"perplexity_increase": self.increase}


@torch.inference_mode()
def compare(before: Decoder, after: Decoder, windows: Sequence[Sequence[int]]) -> Comparison:
    """Compare two models over windows of token ids. Raises ModelError if a model's logits are not finite."""
    judged = []
    for window in windows:
        following = torch.tensor(window[1:], device=before.device)
        states = hidden(before, [window])[:-1], hidden(after, [window])[:-1]
        for parts in zip(*(torch.split(tensor, _ROWS) for tensor in (*states, following)), strict=True):
            logits = _finite(before.logits(parts[0])), _finite(after.logits(parts[1]))
            shares = zip(*(torch.split(tensor, _TOGETHER) for tensor in (*logits, parts[2])), strict=True)
            judged += [_judged(p.log_softmax(-1), q.log_softmax(-1), ids) for p, q, ids in shares]
    before_loss, loss, divergence, agreement = torch.cat(judged).double().cpu().unbind(1)
    return Comparison(
        tokens=len(divergence),
        perplexity_before=math.exp(before_loss.mean()),
        perplexity=math.exp(loss.mean()),
        divergence=float(divergence.mean()),
        divergence_p99=float(divergence.quantile(0.99)),
        agreement=float(agreement.mean()),
    )


@dataclass(frozen=True, slots=True)
class VectorComparison:
    """Compares a quantised encoder with its original, by the mean of the rows of each text."""

    tokens: int
    cosine: float
    """The mean over all texts."""
    cosine_least: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@torch.inference_mode()
def compare_encoders(before: Encoder, after: Encoder, windows: Sequence[Sequence[int]]) -> VectorComparison:
    """Compare two encoders over texts of token ids. Raises ModelError if rows are not finite."""
    cosines = []
    for window in windows:
        ids = torch.tensor(window, device=before.device)
        first, second = (model.forward(ids, ids * 0, [len(window)]).double().mean(0) for model in (before, after))
        cosines.append(torch.nn.functional.cosine_similarity(first, second, dim=0))
    every = _finite(torch.stack(cosines)).double()
    return VectorComparison(sum(map(len, windows)), float(every.mean()), float(every.min()))


def _judged(p: Tensor, q: Tensor, following: Tensor) -> Tensor:
    """Both losses, KL(p || q), and whether the likeliest tokens are the same, [rows, 4]. Overwrites `q`."""
    ids = following[:, None]
    losses = -p.gather(1, ids), -q.gather(1, ids)
    agreed = p.argmax(1, keepdim=True) == q.argmax(1, keepdim=True)
    divergence = torch.linalg.vecdot(p.exp(), q.neg_().add_(p))[:, None].clamp(min=0)
    return torch.cat((*losses, divergence, agreed), 1)


def _finite(logits: Tensor) -> Tensor:
    ends = torch.stack(logits.aminmax())
    if not bool(torch.isfinite(ends).all()):
        raise ModelError("the model's logits are not finite numbers: it cannot be compared")
    return logits.float()
