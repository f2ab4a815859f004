"""Steps over a shuffled paged cache in which whatever no query may see is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kernels import RaggedBatch

#: (tokens of this step, places filled once they are written)
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Case:
    shape: Shape
    query: Tensor
    """[tokens, heads, head_dim]; its tokens lie further apart than its heads need."""
    cache: Tensor
    batch: RaggedBatch
    tables: tuple[Tensor, ...]
    """int64 [blocks] of each sequence that is no padding."""
    lengths: Lengths

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def on(self, device: torch.device) -> Case:
        moved = {
            name: getattr(self.batch, name).to(device)
            for name in ("slots", "query_starts", "kv_lens", "tables", "table_rows")
        }
        query = _apart(self.query.to(device), self.shape)
        return replace(self, query=query, cache=self.cache.to(device), batch=replace(self.batch, **moved))

    def wide(self) -> Case:
        """The same numbers in fp32."""
        return replace(self, query=self.query.float(), cache=self.cache.float())

    def later(self, dropped: int) -> RaggedBatch:
        """The same step, but its tables begin after `dropped` blocks of each sequence."""
        before = dropped * self.shape.block
        ends = [torch.arange(kv_len - count, kv_len) for count, kv_len in self.lengths]
        return replace(
            self.batch,
            kv_lens=self.batch.kv_lens - before,
            tables=self.batch.tables[:, dropped:].contiguous(),
            positions=torch.cat(ends),
        )


def ragged_case(shape: Shape, lengths: Lengths, *, padding: int = 0, spare_rows: int = 0, seed: int = 0) -> Case:
    """`padding` sequences of no tokens follow those of `lengths`, and `spare_rows` token rows that belong to none."""
    random = torch.Generator().manual_seed(seed)
    counts, kv_lens = [count for count, _ in lengths], [kv_len for _, kv_len in lengths]
    blocks = [-(-kv_len // shape.block) for kv_len in kv_lens]
    pool = sum(blocks) + 3
    free = torch.randperm(pool, generator=random)
    own = tuple(free[: sum(blocks)].split(blocks))
    cache = torch.full((2, pool, shape.block, shape.kv_heads, shape.head_dim), float("nan"))
    # Rows of the permanent tables that others own, and what lies behind a table's last block, name no block at all.
    table_rows = torch.randperm(len(lengths) + padding + 2, generator=random)[: len(lengths) + padding]
    tables = torch.full((len(lengths) + padding + 2, max(blocks, default=0) + 2), 1 << 30, dtype=torch.int32)
    slots = []
    for (count, kv_len), table, row in zip(lengths, own, table_rows.tolist(), strict=False):
        tables[row, : len(table)] = table
        places = torch.arange(kv_len)
        all_slots = table[places // shape.block] * shape.block + places % shape.block
        cache.view(2, -1, shape.kv_heads, shape.head_dim)[:, all_slots] = torch.randn(
            2, kv_len, shape.kv_heads, shape.head_dim, generator=random
        )
        slots.append(all_slots[kv_len - count :])
    rows = sum(counts) + spare_rows
    query = torch.randn(rows, shape.heads, shape.head_dim, generator=random).to(shape.dtype)
    batch = RaggedBatch(
        slots=torch.cat((*slots, torch.full((spare_rows,), -1))),
        query_starts=torch.tensor([0, *counts, *[0] * padding]).cumsum(0).int(),
        kv_lens=torch.tensor([*kv_lens, *[0] * padding], dtype=torch.int32),
        tables=tables,
        table_rows=table_rows.int(),
        most_queries=max(counts, default=1),
        most_places=max(kv_lens, default=1),
        window=shape.window,
    )
    return Case(shape, _apart(query, shape), cache.to(shape.dtype), batch, own, lengths)


def _apart(query: Tensor, shape: Shape) -> Tensor:
    """As a part of a packed q, k, v product."""
    others = query.new_full((len(query), 2 * shape.kv_heads, shape.head_dim), float("nan"))
    return torch.cat((query, others), 1)[:, : shape.heads]
