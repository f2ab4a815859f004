"""Measures how far a model's next-token distributions are from those of another model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.models.decoder import Decoder
from engine.quant.make.walk import hidden

#: The number of rows whose logits are held at one time.
_ROWS = 128


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
    divergences, losses, agreed = [], [], 0
    for window in windows:
        following = torch.tensor(window[1:], device=before.device)
        states = hidden(before, [window])[0][:-1], hidden(after, [window])[0][:-1]
        for rows in range(0, len(following), _ROWS):
            part = slice(rows, rows + _ROWS)
            p, q = (
                _log_probabilities(model, state[part]) for model, state in zip((before, after), states, strict=True)
            )
            ids = following[part, None]
            losses.append(torch.cat((-p.gather(1, ids), -q.gather(1, ids)), 1).double().cpu())
            divergences.append((p.exp() * (p - q)).sum(1).double().clamp(min=0).cpu())
            agreed += int((p.argmax(1) == q.argmax(1)).sum())
    before_loss, loss = torch.cat(losses).mean(0).tolist()
    divergence = torch.cat(divergences)
    return Comparison(
        tokens=len(divergence),
        perplexity_before=math.exp(before_loss),
        perplexity=math.exp(loss),
        divergence=float(divergence.mean()),
        divergence_p99=float(divergence.quantile(0.99)),
        agreement=agreed / len(divergence),
    )


def _log_probabilities(model: Decoder, hidden: Tensor) -> Tensor:
    logits = model.logits(hidden).float()
    if not bool(torch.isfinite(logits).all()):
        raise ModelError("the model's logits are not finite numbers: it cannot be compared")
    return logits.log_softmax(-1)
