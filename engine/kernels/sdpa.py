"""Attention as a few padded batches through torch's scaled_dot_product_attention, on any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.groups import AttentionBatch, AttentionGroup
from engine.kernels.reference import Reference


class Sdpa(Reference):
    name = "sdpa"
    # Launches cost more than padding on an accelerator: few groups.
    padding = (2.0, 256)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def paged_attention(self, query: Tensor, cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        heads, head_dim = query.shape[1:]
        kv_heads = cache.shape[3]
        out = torch.empty_like(query)
        for group in batch.groups:
            sequences, length = len(group.kv_lens), group.query_len
            keys, values = self.gather(cache, group)
            if group.is_fresh:
                keys, values = keys[:, :, :length], values[:, :, :length]
            q = query[group.rows]
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
                is_causal=group.is_fresh,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            out[group.rows] = o.transpose(1, 2).reshape(sequences * length, heads, head_dim)
        return out

    def gather(self, cache: Tensor, group: AttentionGroup) -> tuple[Tensor, Tensor]:
        """The group's K and V, each [sequences, kv_heads, padded context, head_dim]."""
        sequences, blocks = group.block_tables.shape
        _, _, block_size, kv_heads, head_dim = cache.shape
        flat = group.block_tables.view(-1)
        shape = (sequences, blocks * block_size, kv_heads, head_dim)
        return (
            cache[0].index_select(0, flat).view(shape).transpose(1, 2),
            cache[1].index_select(0, flat).view(shape).transpose(1, 2),
        )
