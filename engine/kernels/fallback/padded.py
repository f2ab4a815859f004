"""A step in padded batches, for torch's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """One padded batch: sequences with the same number of tokens in this step and similar contexts.

    The group's token rows are `row .. row + len(kv_lens) * query_len`, sequence after sequence. Query j of sequence i
    is at place `kv_lens[i] - query_len + j` of its block table.
    """

    row: int
    query_len: int
    kv_lens: tuple[int, ...]
    """The tokens in each sequence's block table, this step's included."""
    block_tables: Tensor
    """int64 [sequences, blocks of the longest]."""
    mask: Tensor | None
    """[sequences, 1, query_len, padded context], added to scores: 0 where a query sees and -inf elsewhere. None if
    attention is a plain lower triangle: all tables hold only this step's tokens, and each query sees all tokens before
    it."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.kv_lens) * self.query_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatch(RaggedBatch):
    groups: tuple[PaddedGroup, ...]
    """All sequences, in order."""


def padded(batch: RaggedBatch, groups: Sequence[PaddedGroup]) -> PaddedBatch:
    """The batch with its `groups`."""
    return PaddedBatch(
        **{field.name: getattr(batch, field.name) for field in fields(RaggedBatch)}, groups=tuple(groups)
    )


def groups_of(batch: RaggedBatch, block_size: int, padding: tuple[float, int]) -> list[PaddedGroup]:
    """Neighbours of a batch without padding rows in groups, without masks. `padding`: see `runs`."""
    starts, lengths = batch.query_starts.tolist(), batch.kv_lens.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    groups = []
    for first, end in runs(counts, lengths, *padding):
        width = -(-max(lengths[first:end]) // block_size)
        tables = batch.tables[:, :width].index_select(0, batch.table_rows[first:end]).long()
        groups.append(PaddedGroup(starts[first], counts[first], tuple(lengths[first:end]), tables, None))
    return groups


def masked(group: PaddedGroup, window: int | None, block_size: int, dtype: torch.dtype) -> PaddedGroup:
    """The group with the mask that it needs."""
    fresh = all(length == group.query_len for length in group.kv_lens)
    if fresh and (window is None or group.query_len <= window):
        return group
    lengths = torch.tensor(group.kv_lens, device=group.block_tables.device)
    visible = visibility(lengths, group.query_len, group.block_tables.shape[1] * block_size, window)
    return replace(group, mask=additive(visible, dtype))


def runs(counts: Sequence[int], lengths: Sequence[int], ratio: float, slack: int) -> list[tuple[int, int]]:
    """Split sequences into runs (first, end) that each share one padded batch.

    The sequences of a run compute equally many tokens. Their lengths are at most `ratio` times the first one's plus
    `slack`.
    """
    bounds: list[tuple[int, int]] = []
    first = 0
    for i in range(1, len(counts) + 1):
        if i < len(counts) and counts[i] == counts[first] and lengths[i] <= ratio * lengths[first] + slack:
            continue
        bounds.append((first, i))
        first = i
    return bounds


def visibility(kv_lens: Tensor, query_len: int, places: int, window: int | None) -> Tensor:
    """The places that each query of a group sees, bool [sequences, 1, query_len, places].

    `kv_lens`: integers [sequences]. `places`: the number that the group's block tables span.
    """
    query = torch.arange(query_len, device=kv_lens.device)
    last_seen = ((kv_lens - query_len)[:, None] + query)[:, None, :, None]
    position = torch.arange(places, device=kv_lens.device)
    visible = position <= last_seen
    return visible if window is None else visible & (position > last_seen - window)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees and -inf elsewhere, of the shape of `visible`, bool."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
