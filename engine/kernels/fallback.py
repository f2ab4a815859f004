"""Kernel sets made of torch's own operations, for machines without the native library or Triton.

`Sdpa`: for any device, with attention in a few padded batches by torch's scaled_dot_product_attention
`Cpu`: the same for CPUs, with weights packed once by oneDNN and scratch memory to gather into
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.layer import PreparedLinear
from engine.kernels.ragged import RaggedBatch
from engine.kernels.reference import Reference


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


class Sdpa(Reference):
    name = "sdpa"
    #: (ratio, tokens): sequences share a padded batch if the longest context is at most ratio * shortest + tokens.
    #: On an accelerator launches cost more than padding, so make few groups.
    padding = (2.0, 256)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return super().rms_norm(x, weight, eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # infinite where that is 0
        return F.rms_norm(x, weight.shape, weight, eps).add_((length - length).to(x.dtype))

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


class Cpu(Sdpa):
    name = "cpu"
    # Attention spends most of its time gathering, so pad little.
    padding = (1.25, 64)

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__(compute_dtype)
        self._scratch = torch.empty(2, 0, dtype=compute_dtype)

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        if not (torch._C._has_mkldnn and computes_natively(self.compute_dtype)):
            return super().prepare_linear(weight, bias)
        self.keeps(weight.shape, weight.nbytes)
        # Without a batch size oneDNN picks a layout within 5% of the best one for every count of rows from 1 to 512.
        # It is up to twice as fast as F.linear, which packs the weight again at every call.
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        run = torch.ops.mkldnn._linear_pointwise.default

        def linear(x: Tensor) -> Tensor:
            out: Tensor = run(x, packed, bias, "none", [], "")
            return out

        return linear

    def gather(self, cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        # With fresh memory for every gather, page faults cost more than the copy (25 to 112 ms compared to 3).
        sequences, blocks = tables.shape
        _, _, block_size, kv_heads, head_dim = cache.shape
        width = block_size * kv_heads * head_dim
        flat = tables.view(-1)
        if self._scratch.shape[1] < flat.numel() * width:
            self._scratch = torch.empty(2, flat.numel() * width, dtype=cache.dtype)
        gathered = []
        for part, scratch in zip(cache, self._scratch, strict=True):
            target = scratch[: flat.numel() * width].view(-1, width)
            torch.index_select(part.view(-1, width), 0, flat, out=target)
            gathered.append(target.view(sequences, blocks * block_size, kv_heads, head_dim).transpose(1, 2))
        return gathered[0], gathered[1]


def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for `dtype`, according to torch.

    Without them bf16 products are emulated. A product of 32 rows then took 6 times as long as in fp32 (AVX2, torch
    2.13).
    """
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32
