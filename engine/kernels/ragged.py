"""A step as tensors alone, one row a sequence and no padding between them; and its operations in plain torch.

Whatever a kernel needs to know about a sequence it reads on the device, so that a CUDA graph recorded once can be
replayed with other lengths, tables and slots in the same tensors. The operations here are the oracle of the kernels
that do so, and what a device without them falls back on: they ask the device for lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.groups import AttentionBatch


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """A step, as the layers of one KV group see it.

    Query j of sequence i stands at place `kv_lens[i] - (its query count) + j` of its block table, and sees every place
    up to its own, or as many of them as the window lets it. A windowed group's table may begin at the first block that
    is still held: lengths and places are relative to that.
    """

    slots: Tensor
    """int64 [tokens]: where each token's K and V go, as block * block_size + offset. -1 is padding: nothing is
    written."""
    query_starts: Tensor
    """int32 [sequences + 1]: the token rows of sequence i are query_starts[i] .. query_starts[i + 1]. It repeats for a
    sequence that is padding; rows from query_starts[-1] on belong to none, and come out zero."""
    kv_lens: Tensor
    """int32 [sequences]: places of the block table that are filled once this step's are written. 0 is padding: rows
    come out zero."""
    tables: Tensor
    """int32 [rows, width]: block tables. What lies behind a sequence's last block may be anything."""
    table_rows: Tensor
    """int32 [sequences]: which row of `tables` is whose."""
    most_queries: int
    """Bound on the tokens of one sequence, known to the host. 1: every sequence decodes."""
    most_places: int
    """Bound on `kv_lens`, known to the host; under a graph, the largest that the graph is for."""
    window: int | None = None
    """How many places a query sees, its own included; None for all before it."""
    positions: Tensor | None = None
    """int64 [tokens], from each sequence's first token: tells what lies before a table."""


#: What attention has to know about a step, in either layout.
Attended = AttentionBatch | RaggedBatch


def ragged_attention(
    query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
) -> Tensor:
    """As Reference.paged_attention, sequence after sequence in fp32. Returns [tokens, heads, head_dim]."""
    out = torch.zeros_like(query)
    starts, rows = batch.query_starts.tolist(), batch.table_rows.tolist()
    for i, kv_len in enumerate(batch.kv_lens.tolist()):
        queries = slice(starts[i], starts[i + 1])
        if kv_len == 0 or queries.start == queries.stop:
            continue
        blocks = batch.tables[rows[i], : -(-kv_len // cache.shape[2])].long()
        keys, values = cache[:, blocks].flatten(1, 2)[:, :kv_len]
        out[queries] = causal(query[queries], keys, values, scale, softcap, batch.window)
    return out


def causal(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    """Attention of the last tokens of one sequence over all of it, in fp32.

    `query` is [queries, heads, head_dim], `keys` and `values` [places, kv_heads, head_dim]; the last query stands at
    the last place. Query head h reads KV head h // (heads / kv_heads). Returns the shape and dtype of `query`.
    """
    queries, places, share = len(query), len(keys), query.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float().repeat_interleave(share, 1)) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    query_at = torch.arange(places - queries, places, device=query.device)[:, None]
    key_at = torch.arange(places, device=query.device)[None]
    hidden = key_at > query_at
    if window is not None:
        hidden |= key_at <= query_at - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values.float().repeat_interleave(share, 1)).to(query.dtype)


def write_ragged(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """As Reference.write_kv, but rows whose slot is -1 are left out."""
    own = slots >= 0
    flat = cache.view(2, -1, *cache.shape[3:])
    flat[0].index_copy_(0, slots[own], key[own])
    flat[1].index_copy_(0, slots[own], value[own])
