"""Describes a step for attention in fixed chunks: queries, chunks and masks.

Chunk c of a sequence is its places from c * CHUNK on, counted from its first token. It does not depend on which of them
a step computes, shares or has dropped behind a window. A tile is some queries of one sequence, or one query of each of
several sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.groups import AttentionBatch, AttentionGroup

if TYPE_CHECKING:
    from collections.abc import Callable

#: The places of one chunk: a whole number of blocks of 1, 2, 4 .. 128 tokens.
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Tile:
    queries: slice
    """The queries, as a slice of each sequence's tokens in this step."""
    rows: int
    """The padded number of rows: queries times the query heads of one KV head."""
    chunks: slice
    """The chunks that any of its queries sees, among those of the tables."""
    mask: Tensor
    """[sequences * chunks, 1, rows, CHUNK], added to scores: 0 or -inf. It is all 0 for a row that sees nothing."""
    seen: Tensor
    """bool [sequences, chunks, 1, rows]: whether the row sees anything in the chunk."""


@dataclass(frozen=True, slots=True)
class ChunkedGroup:
    """Sequences with the same number of tokens in this step. It has several sequences only if that number is one."""

    row: int
    query_len: int
    block_tables: Tensor
    """int64 [sequences, blocks of all chunks]: each table begins with a chunk. Padded with the zero block."""
    tiles: tuple[Tile, ...]

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.block_tables) * self.query_len)


@dataclass(frozen=True, slots=True)
class ChunkedBatch(AttentionBatch):
    chunked: tuple[ChunkedGroup, ...] = ()


def chunked(
    batch: AttentionBatch,
    block_size: int,
    zero_block: int,
    share: int,
    padded: Callable[[int], int],
    most_rows: int,
    dtype: torch.dtype,
) -> ChunkedBatch:
    """Convert a batch for chunked attention.

    `share`: query heads of one KV head. `padded(rows)`: the padded size of a tile of `rows` rows. `most_rows`: the most
    rows of a tile. `dtype`: that of masks.
    """
    groups = [
        _chunked(one, block_size, zero_block, share, padded, most_rows, batch.window, dtype)
        for group in batch.groups
        for one in ([group] if group.query_len == 1 else _single(group))
    ]
    return ChunkedBatch(batch.slots, batch.groups, batch.window, tuple(groups))


def _single(group: AttentionGroup) -> list[AttentionGroup]:
    """Split a group into single sequences."""
    return [
        AttentionGroup(
            group.row + i * group.query_len,
            group.query_len,
            group.kv_lens[i : i + 1],
            group.block_tables[i : i + 1],
            None,
            group.skipped[i : i + 1],
        )
        for i in range(len(group.kv_lens))
    ]


def _chunked(
    group: AttentionGroup,
    block_size: int,
    zero_block: int,
    share: int,
    padded: Callable[[int], int],
    most_rows: int,
    window: int | None,
    dtype: torch.dtype,
) -> ChunkedGroup:
    # A windowed table may begin within a chunk. The blocks of that chunk before it are padding.
    leads = [skipped % CHUNK for skipped in group.skipped]
    ends = [lead + kv_len for lead, kv_len in zip(leads, group.kv_lens, strict=True)]
    per_chunk = CHUNK // block_size
    count = -(-max(ends) // CHUNK)
    tables = group.block_tables.new_full((len(ends), count * per_chunk), zero_block)
    for i, (lead, end) in enumerate(zip(leads, ends, strict=True)):
        first, last = lead // block_size, -(-end // block_size)
        tables[i, first:last] = group.block_tables[i, : last - first]
    begins = torch.tensor(ends) - group.query_len
    tiles = []
    size = most_rows // share
    for first in range(0, group.query_len, size):
        queries = slice(first, min(first + size, group.query_len))
        own = begins[:, None] + torch.arange(queries.start, queries.stop)
        lowest = 0 if window is None else max(int(own[:, 0].min()) - window + 1, 0)
        chunks = slice(0, count)
        if len(ends) == 1:
            chunks = slice(lowest // CHUNK, int(own.max()) // CHUNK + 1)
        rows = padded((queries.stop - queries.start) * share)
        tiles.append(Tile(queries, rows, chunks, *_masks(own, chunks, share, rows, window, dtype)))
    return ChunkedGroup(group.row, group.query_len, tables, tuple(tiles))


def _masks(
    own: Tensor, chunks: slice, share: int, rows: int, window: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """A tile's `mask` and `seen`. `own`: int64 [sequences, queries], the places of the queries."""
    places = torch.arange(chunks.start * CHUNK, chunks.stop * CHUNK).view(1, -1, 1, CHUNK)
    last = own[:, None, :, None]
    visible = places <= last
    if window is not None:
        visible &= places > last - window
    seen = visible.any(-1)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible & seen[..., None], float("-inf"))
    spare = rows - share * own.shape[1]
    mask = F.pad(mask.repeat_interleave(share, 2), (0, 0, 0, spare))
    seen = F.pad(seen.repeat_interleave(share, 2), (0, spare), value=True)
    return mask.flatten(0, 1)[:, None], seen[:, :, None]
