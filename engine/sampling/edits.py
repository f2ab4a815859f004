"""Edits a step's logits before sampling: penalties, biases, allowed and banned tokens, forms.

The order is that of transformers and vLLM: repetition penalty, frequency and presence penalties, logit_bias,
allowed_token_ids, banned_token_ids (with bad words, and with the end tokens before min_tokens), the output's form.
Each edit but the last is a list of (row, token) pairs, so that its cost is proportional to the request's lists, not to
the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NONE_LEFT = (
    "no token is left to choose: allowed_token_ids, banned_token_ids, bad_words, min_tokens and the output's form "
    "together forbid them all"
)


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of a step, by pairs of row and token id. No pair occurs twice."""

    rows: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs]."""
    repetition: Tensor
    """fp32 [pairs]: divides a positive logit, multiplies a negative one (CTRL, arXiv 1909.05858)."""
    minus: Tensor
    """fp32 [pairs]: subtracted after that."""


@dataclass(frozen=True, slots=True)
class Allowed:
    only: Tensor
    """int64: the rows that may only choose the tokens below."""
    rows: Tensor
    """int64 [pairs]."""
    ids: Tensor
    """int64 [pairs]."""


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of one step. A field is None if no row needs it."""

    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    """(rows, ids, values). No pair occurs twice."""
    allowed: Allowed | None = None
    banned: tuple[Tensor, Tensor] | None = None
    """(rows, ids)."""
    forms: tuple[Tensor, Tensor] | None = None
    """(rows, in their order; the tokens that would leave an output's form, bool [these rows, vocabulary])."""

    @property
    def forbids(self) -> bool:
        """Whether a row may have no token left to choose."""
        return self.allowed is not None or self.banned is not None or self.forms is not None


def edit(logits: Tensor, edits: Edits) -> None:
    """Apply the edits to `logits`, fp32 [rows, vocabulary], in place."""
    penalties = edits.penalties
    if penalties is not None:
        index = (penalties.rows, penalties.ids)
        values = logits[index]
        values = (values / penalties.repetition).where(values > 0, values * penalties.repetition)
        logits.index_put_(index, values - penalties.minus)
    if edits.bias is not None:
        rows, ids, values = edits.bias
        logits.index_put_((rows, ids), logits[rows, ids] + values)
    forbidden = logits.new_full((), float("-inf"))
    if edits.allowed is not None:
        index = (edits.allowed.rows, edits.allowed.ids)
        values = logits[index]
        logits.index_fill_(0, edits.allowed.only, float("-inf"))
        logits.index_put_(index, values)
    if edits.banned is not None:
        logits.index_put_(edits.banned, forbidden)
    if edits.forms is not None:
        rows, leaving = edits.forms
        if len(rows) == len(logits):
            logits.masked_fill_(leaving, float("-inf"))
        else:
            logits[rows] = logits[rows].masked_fill_(leaving, float("-inf"))
