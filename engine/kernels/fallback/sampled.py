"""Attention of decode steps over keys and values in the cache, without gathering them.

Scores are a product computed only at the places of a sparse pattern, with one row for each query head. The weighted
values are summed like rows of an embedding table. Both run on all threads, and need no memory for the keys and values
read. This takes about half as long as gathering them for scaled_dot_product_attention (tests/bench/sampled.py). But a
key is read once for each query head that shares it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.fallback.padded import PaddedGroup
from engine.kernels.fallback.pieces import piece

#: The most query heads that share a KV head. With more, gathering pays, because it reads each key once: with 4 heads it
#: takes 1.2 times as long, with 7 as long, with 8 0.7 to 0.95 times.
MOST_SHARED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroup(PaddedGroup):
    """A group of sequences that decode one token each. No sequence reads beyond its last place."""

    pattern: Tensor
    """Sparse CSR, fp32 [sequences * heads, rows of the cache's heads]. Row (i, h) has the place, and head, of every key
    that query head h of sequence i sees, padded with its first place to the width of the longest. The values are 0
    between products."""
    hidden: Tensor | None
    """[sequences, 1, width], 0 or -inf, added to scores [sequences, heads, width]. None if all see equally many
    places."""


def sampled(
    group: PaddedGroup, window: int | None, block_size: int, zero_block: int, heads: int, kv_heads: int
) -> SampledGroup:
    """Convert a group whose sequences decode one token each, over a cache of `zero_block` + 1 blocks."""
    ends = torch.tensor(group.kv_lens)
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
    seen = ends - begins
    width, sequences = int(seen.max()), len(ends)
    ahead = torch.arange(width)
    beyond = ahead >= seen[:, None]
    # A sequence that sees fewer places than the longest sees them from its first place on, so place 0 is valid padding.
    at = (begins[:, None] + ahead).masked_fill_(beyond, 0)
    places = group.block_tables.gather(1, at // block_size) * block_size + at % block_size
    # 32 bits can number the heads of more than half a TiB of keys, and are twice as fast to read as 64 bits.
    head = torch.arange(heads, dtype=torch.int32) // (heads // kv_heads)
    columns = (places.int() * kv_heads)[:, None] + head[:, None]
    pattern = torch.sparse_csr_tensor(
        torch.arange(sequences * heads + 1, dtype=torch.int32) * width,
        columns.view(-1),
        torch.zeros(columns.numel()),
        size=(sequences * heads, (zero_block + 1) * block_size * kv_heads),
        check_invariants=False,
    )
    hidden = torch.zeros(sequences, 1, width).masked_fill_(beyond[:, None], float("-inf")) if beyond.any() else None
    return SampledGroup(
        row=group.row,
        query_len=group.query_len,
        kv_lens=group.kv_lens,
        block_tables=group.block_tables,
        mask=None,
        pattern=pattern,
        hidden=hidden,
    )


def sampled_attention(query: Tensor, cache: Tensor, group: SampledGroup, scale: float, softcap: float | None) -> Tensor:
    """Attention of `query`, fp32 [sequences, heads, head_dim], over one layer's `cache`. Returns the shape of
    `query`."""
    sequences, heads, head_dim = query.shape
    keys, values = cache.view(2, -1, head_dim)
    pattern = group.pattern
    torch.sparse.sampled_addmm(
        pattern,
        query.reshape(-1, head_dim),
        keys.t(),
        beta=0.0,
        alpha=scale if softcap is None else scale / softcap,
        out=pattern,
    )
    weights = _weights(pattern.values().view(sequences, heads, -1), group.hidden, softcap)
    summed = torch.embedding_bag(
        values,
        pattern.col_indices(),
        pattern.crow_indices(),
        mode=0,
        per_sample_weights=weights.view(-1),
        include_last_offset=True,
    )
    return summed[0].view(query.shape)


def _weights(scores: Tensor, hidden: Tensor | None, softcap: float | None) -> Tensor:
    """Softmax of `scores`, [sequences, heads, width]. It then sets `scores` to 0, because the next product adds them
    times 0, and NaNs would stay NaNs. `hidden`: see SampledGroup."""
    weights = torch.empty_like(scores)
    size = piece(len(scores), scores[0].numel())
    for first in range(0, len(scores), size):
        part = slice(first, first + size)
        own = scores[part]
        if softcap is not None:
            own.tanh_().mul_(softcap)
        if hidden is not None:
            own.add_(hidden[part])
        torch.softmax(own, -1, out=weights[part])
        own.zero_()
    return weights


def forewarned() -> None:
    """Suppress torch's warning, once in a process, that its sparse tensors may still change. Operators cannot act on
    it, and tests check the two operations used here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        torch.sparse_csr_tensor(
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(0, dtype=torch.int32),
            torch.zeros(0),
            size=(0, 0),
            check_invariants=False,
        )
