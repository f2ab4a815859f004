"""The description of a step for attention in padded batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One padded batch: sequences with the same number of tokens in this step and similar contexts.

    The group's token rows are `row .. row + len(kv_lens) * query_len`, sequence after sequence. Query j of sequence i
    is at place `kv_lens[i] - query_len + j` of its block table. It sees every place up to its own, within the layer's
    window.
    """

    row: int
    query_len: int
    kv_lens: tuple[int, ...]
    """The tokens in each sequence's block table, this step's included. The host knows them, so that no kernel waits for
    the device."""
    block_tables: Tensor
    """int64 [sequences, blocks of the longest], padded with the zero block."""
    mask: Tensor | None
    """bool [sequences, 1, query_len, padded context], True where a query sees, or the result of `additive`.

    None if attention is a plain lower triangle: all tables hold only this step's tokens, and each query sees all tokens
    before it. Also None for sets that are not `masked`.
    """
    skipped: tuple[int, ...] = ()
    """The number of each sequence's tokens before its table begins, because they fell out of the window."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.kv_lens) * self.query_len)


def visibility(kv_lens: Tensor, query_len: int, padded: int, window: int | None) -> Tensor:
    """The places that each query of a group sees, bool [sequences, 1, query_len, padded].

    `kv_lens`: int64 [sequences] on the device. `padded`: the number of places that the group's block tables span.
    """
    query = torch.arange(query_len, device=kv_lens.device)
    last_seen = ((kv_lens - query_len)[:, None] + query)[:, None, :, None]
    places = torch.arange(padded, device=kv_lens.device)
    seen = places <= last_seen
    return seen if window is None else seen & (places > last_seen - window)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask: 0 where a query sees and -inf elsewhere. A mask that is already additive is returned
    unchanged."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step of one KV group, in padded batches."""

    slots: Tensor
    """int64 [tokens]: the KV slot of each token, block * block_size + offset."""
    groups: tuple[AttentionGroup, ...]
    window: int | None = None
    """The number of places that a query sees, its own included. None: all before it."""
