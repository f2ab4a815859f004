"""What attention has to know about a step besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Sequences that have the same number of tokens in this step and similar contexts: one padded batch.

    The group's token rows are `row .. row + len(kv_lens) * query_len`, sequence after sequence. Query j of
    sequence i stands at place `kv_lens[i] - query_len + j` of its block table, and sees every place up to its own, or
    as many of them as the layer's window lets it.
    """

    row: int
    query_len: int
    kv_lens: tuple[int, ...]
    """Tokens in each sequence's block table once this step's have been written. Known to the host, so that no kernel
    has to ask the device for a length."""
    block_tables: Tensor
    """int64 [sequences, blocks of the longest]; padded with the block of zeros."""
    mask: Tensor | None
    """bool [sequences, 1, query_len, padded context], True where a query sees, or what `additive` makes of that; None
    where no sequence has anything in its table but this step's tokens, and each sees all before it: attention is a
    plain lower triangle. Also None for sets that are not `masked`."""
    skipped: tuple[int, ...] = ()
    """Tokens of each sequence before its table begins: behind the window."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.kv_lens) * self.query_len)


def visibility(kv_lens: Tensor, query_len: int, padded: int, window: int | None) -> Tensor:
    """bool [sequences, 1, query_len, padded]: which places each query of a group sees.

    `kv_lens` is int64 [sequences] on the device, `padded` the places that the group's block tables span.
    """
    query = torch.arange(query_len, device=kv_lens.device)
    last_seen = ((kv_lens - query_len)[:, None] + query)[:, None, :, None]
    places = torch.arange(padded, device=kv_lens.device)
    seen = places <= last_seen
    return seen if window is None else seen & (places > last_seen - window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: 0 where a query sees and -inf where it does not. One that is so is itself."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step, as the layers of one KV group see it."""

    slots: Tensor
    """int64 [tokens]: where each token's K and V go, as block * block_size + offset."""
    groups: tuple[AttentionGroup, ...]
    window: int | None = None
    """How many places a query sees, its own included; None for all before it."""
