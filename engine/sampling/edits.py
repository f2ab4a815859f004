"""What is done to a step's logits before a token is chosen: penalties, biases, then what may not be chosen at all.

The order is transformers' and vLLM's: the penalty for repetition, those for frequency and presence, logit_bias,
allowed_token_ids, banned_token_ids (with bad words, and the ends that min_tokens forbids). Each is a list of
(row, token) pairs, so that its cost goes with what was asked for and not with the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NONE_LEFT = (
    "no token is left to choose: allowed_token_ids, banned_token_ids, bad_words and min_tokens together forbid them all"
)


@dataclass(frozen=True, slots=True)
class Penalties:
    """No pair comes twice."""

    rows: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs]."""
    repetition: Tensor
    """fp32 [pairs]: divides a positive logit, multiplies a negative one (CTRL, arXiv 1909.05858)."""
    minus: Tensor
    """fp32 [pairs]: taken off then."""


@dataclass(frozen=True, slots=True)
class Allowed:
    only: Tensor
    """int64: the rows that may choose among these tokens alone."""
    rows: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs]."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Of one step. None stands for: no row wants it."""

    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    """(rows, ids, values); no pair comes twice."""
    allowed: Allowed | None = None
    banned: tuple[Tensor, Tensor] | None = None
    """(rows, ids)."""

    @property
    def forbids(self) -> bool:
        """Whether a row may be left without any token."""
        return self.allowed is not None or self.banned is not None


def edit(logits: Tensor, edits: Edits) -> None:
    """Change `logits` fp32 [rows, vocabulary] in place."""
    penalties = edits.penalties
    if penalties is not None:
        place = (penalties.rows, penalties.ids)
        found = logits[place]
        found = (found / penalties.repetition).where(found > 0, found * penalties.repetition)
        logits.index_put_(place, found - penalties.minus)
    if edits.bias is not None:
        rows, ids, values = edits.bias
        logits.index_put_((rows, ids), logits[rows, ids] + values)
    forbidden = logits.new_full((), float("-inf"))
    if edits.allowed is not None:
        place = (edits.allowed.rows, edits.allowed.ids)
        found = logits[place]
        logits.index_fill_(0, edits.allowed.only, float("-inf"))
        logits.index_put_(place, found)
    if edits.banned is not None:
        logits.index_put_(edits.banned, forbidden)
