"""A kernel set for any device, with attention in a few padded batches by torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.fallback.padded import PaddedBatch, PaddedGroup, additive, groups_of, masked, padded
from engine.kernels.ragged import RaggedBatch
from engine.kernels.reference import Reference


class Sdpa(Reference):
    name = "sdpa"
    #: (ratio, tokens): sequences share a padded batch if the longest context is at most ratio * shortest + tokens.
    #: On an accelerator launches cost more than padding, so make few groups.
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
        self, query: Tensor, cache: Tensor, batch: RaggedBatch, scale: float, softcap: float | None = None
    ) -> Tensor:
        if not isinstance(batch, PaddedBatch):
            return super().paged_attention(query, cache, batch, scale, softcap)
        if len(batch.groups) == 1:
            return self._attend(query, cache, batch.groups[0], scale, softcap)
        out = torch.empty_like(query)
        for group in batch.groups:
            out[group.rows] = self._attend(query[group.rows], cache, group, scale, softcap)
        return out

    def _attend(self, query: Tensor, cache: Tensor, group: PaddedGroup, scale: float, softcap: float | None) -> Tensor:
        """`paged_attention` of one group. `query`: its rows, [sequences * query_len, heads, head_dim]."""
        sequences, length = len(group.kv_lens), group.query_len
        heads, head_dim = query.shape[1:]
        kv_heads = cache.shape[3]
        keys, values = self.gather(cache, group.block_tables)
        mask = group.mask
        if mask is None:
            keys, values = keys[:, :, :length], values[:, :, :length]
        if softcap is not None:
            folded = query.view(sequences, length, kv_heads, -1, head_dim).transpose(1, 2)
            o = _capped(folded, keys, values, mask, scale, softcap)
            return o.transpose(1, 2).reshape(query.shape)
        if length == 1:
            # The query heads of one KV head become its queries: K and V are read once for all of them.
            folded = query.view(sequences, kv_heads, heads // kv_heads, head_dim)
            o = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
            return o.reshape(query.shape)
        o = F.scaled_dot_product_attention(
            query.view(sequences, length, heads, head_dim).transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )
        return o.transpose(1, 2).reshape(query.shape)

    def arrange(self, batch: RaggedBatch, block_size: int, zero_block: int) -> PaddedBatch:
        groups = groups_of(batch, block_size, self.padding)
        # Masks are made once for all layers. torch would convert a bool mask at every call.
        return padded(batch, [masked(group, batch.window, block_size, self.compute_dtype) for group in groups])

    def write_kv(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        # Its steps have no padding rows, and looking for them would wait for the device.
        flat = cache.view(2, -1, *cache.shape[3:])
        flat[0].index_copy_(0, slots, key)
        flat[1].index_copy_(0, slots, value)

    def gather(self, cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Gather K and V of `tables`, [sequences, blocks]: each [sequences, kv_heads, padded context, head_dim]."""
        sequences, blocks = tables.shape
        _, _, block_size, kv_heads, head_dim = cache.shape
        flat = tables.view(-1)
        shape = (sequences, blocks * block_size, kv_heads, head_dim)
        return (
            cache[0].index_select(0, flat).view(shape).transpose(1, 2),
            cache[1].index_select(0, flat).view(shape).transpose(1, 2),
        )


def _capped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention with capped scores, which torch's own does not have. Scores are computed in fp32.

    `query`: [sequences, kv_heads, length, share, head_dim]. `keys`, `values`: [sequences, kv_heads, places, head_dim].
    `mask`: additive, None for a lower triangle. Returns the shape of `query`.
    """
    sequences, kv_heads, length, share, _ = query.shape
    scores = (query.flatten(2, 3) @ keys.transpose(2, 3)).float().mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is None:
        triangle = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        mask = additive(triangle, scores.dtype)[None, None]
    # A mask is one for all heads: [sequences, 1, length, 1, places].
    scores = scores.view(sequences, kv_heads, length, share, -1).add_(mask.unsqueeze(3))
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    out: Tensor = weights @ values
    return out.view(query.shape)
