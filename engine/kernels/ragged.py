"""Ragged batches: a step described by device tensors alone, without padding between sequences, and its operations in
plain torch.

A kernel reads all it needs about a sequence on the device. So a CUDA graph recorded once can be replayed with other
lengths, tables and slots in the same tensors. The operations here are the test oracle of such kernels, and the fallback
of devices without them. They do ask the device for lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """A step of one KV group, as a ragged batch.

    Query j of sequence i is at place `kv_lens[i] - (its query count) + j` of its block table. It sees every place up to
    its own, within the window. A windowed group's table may begin at the first block that is still held; lengths and
    places are relative to that block.
    """

    slots: Tensor
    """int64 [tokens]: the KV slot of each token, block * block_size + offset. -1 is padding, which is not written."""
    query_starts: Tensor
    """int32 [sequences + 1]: the token rows of sequence i are query_starts[i] .. query_starts[i + 1]. A padding
    sequence has none. Rows from query_starts[-1] on belong to no sequence, and their results are zero."""
    kv_lens: Tensor
    """int32 [sequences]: the filled places of the block table, this step's included. 0 is padding: its rows' results
    are zero."""
    tables: Tensor
    """int32 [rows, width]: block tables. Entries after a sequence's last block are arbitrary."""
    table_rows: Tensor
    """int32 [sequences]: the row of each sequence in `tables`."""
    most_queries: int
    """An upper bound of the tokens of one sequence, known to the host. 1: every sequence decodes."""
    most_places: int
    """An upper bound of `kv_lens`, known to the host. In a recorded graph, the graph's upper bound."""
    window: int | None = None
    """The number of places that a query sees, its own included. None: all before it."""
    positions: Tensor | None = None
    """int64 [tokens], counted from each sequence's first token, which tells how many tokens precede a table."""


def ragged_attention(
    query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
) -> Tensor:
    """Reference.paged_attention, sequence after sequence in fp32. Returns [tokens, heads, head_dim]."""
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
    """Attention of the last tokens of one sequence over the whole sequence, in fp32.

    `query`: [queries, heads, head_dim]. `keys`, `values`: [places, kv_heads, head_dim]. The last query is at the last
    place. Query head h reads KV head h // (heads / kv_heads). Returns the shape and dtype of `query`.
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
