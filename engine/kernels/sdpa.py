"""Attention as a few padded batches through torch's scaled_dot_product_attention, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.ragged import Attended, RaggedBatch
from engine.kernels.reference import Reference


class Sdpa(Reference):
    name = "sdpa"
    # Launches cost more than padding on an accelerator: few groups.
    padding = (2.0, 256)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: Attended, scale: float, softcap: float | None = None
    ) -> Tensor:
        if isinstance(batch, RaggedBatch):
            return super().paged_attention(query, cache, batch, scale, softcap)
        heads, head_dim = query.shape[1:]
        kv_heads = cache.shape[3]
        out = torch.empty_like(query)
        for group in batch.groups:
            sequences, length = len(group.kv_lens), group.query_len
            keys, values = self.gather(cache, group.block_tables)
            if group.mask is None:
                keys, values = keys[:, :, :length], values[:, :, :length]
            q = query[group.rows]
            if softcap is not None:
                folded = q.view(sequences, length, kv_heads, -1, head_dim).transpose(1, 2)
                o = _capped(folded, keys, values, group.mask, scale, softcap)
                out[group.rows] = o.transpose(1, 2).reshape(sequences * length, heads, head_dim)
                continue
            if length == 1:
                # The query heads of one KV head become its queries: K and V are read once for all of them.
                folded = q.view(sequences, kv_heads, heads // kv_heads, head_dim)
                o = F.scaled_dot_product_attention(folded, keys, values, attn_mask=group.mask, scale=scale)
                out[group.rows] = o.reshape(sequences, heads, head_dim)
                continue
            o = F.scaled_dot_product_attention(
                q.view(sequences, length, heads, head_dim).transpose(1, 2),
                keys,
                values,
                attn_mask=group.mask,
                is_causal=group.mask is None,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            out[group.rows] = o.transpose(1, 2).reshape(sequences * length, heads, head_dim)
        return out

    def gather(self, cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of `tables` [sequences, blocks], each [sequences, kv_heads, padded context, head_dim]."""
        sequences, blocks = tables.shape
        _, _, block_size, kv_heads, head_dim = cache.shape
        flat = tables.view(-1)
        shape = (sequences, blocks * block_size, kv_heads, head_dim)
        return (
            cache[0].index_select(0, flat).view(shape).transpose(1, 2),
            cache[1].index_select(0, flat).view(shape).transpose(1, 2),
        )


def _capped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention with capped scores, which torch's own has not. Scores are made in fp32.

    `query` is [sequences, kv_heads, length, share, head_dim], `keys` and `values` [sequences, kv_heads, places,
    head_dim], `mask` as a group's, None for a lower triangle. Returns the shape of `query`.
    """
    sequences, kv_heads, length, share, _ = query.shape
    scores = (query.flatten(2, 3) @ keys.transpose(2, 3)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    # A mask is one for all heads: [sequences, 1, length, 1, places].
    scores = scores.view(sequences, kv_heads, length, share, -1).masked_fill_(~mask.unsqueeze(3), float("-inf"))
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    out: Tensor = weights @ values
    return out.view(query.shape)
