"""The deterministic set for CPUs: a row's result depends on nothing but the row."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from engine.kernels.deterministic.agreement import FixedRows, agreeing_rows
from engine.kernels.deterministic.attention import ChunkedAttention
from engine.kernels.deterministic.chunks import CHUNK, ChunkedBatch, chunked
from engine.kernels.fallback.cpu import Cpu
from engine.kernels.groups import AttentionBatch
from engine.kernels.layer import PreparedLinear
from engine.kernels.packed import Int4Weight, Int8Weight
from engine.kernels.ragged import Attended
from engine.kernels.reference import Reference

_GELU = math.sqrt(2 / math.pi)


class DeterministicCpu(Cpu):
    """The deterministic set for CPUs. Products and attention use call sizes that agree. The other operations compute
    every element, or row, by itself.

    torch's silu and gelu do not: they compute the rest at the end of a thread's part of a tensor with other code than
    whole vectors, and with other last bits. exp and tanh use the same code for both.
    """

    name = "cpu-deterministic"
    masked = False
    chunk = CHUNK
    padding = (1.25, CHUNK)

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__(compute_dtype)
        self._sizes: dict[tuple[torch.Size, bool], tuple[int, ...]] = {}
        self._attention: ChunkedAttention | None = None
        self._bits = hashlib.sha256()

    @property
    def identity(self) -> str:
        """The name with a hash of the trials' results. It differs if a machine or number of threads computes
        differently."""
        return f"{self.name}:{CHUNK}:{self._bits.hexdigest()}"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        run = super().prepare_linear(weight, bias)
        kind = (weight.shape, bias is not None)
        if kind not in self._sizes:
            self._sizes[kind], bits = agreeing_rows(run, weight)
            self._bits.update(bits)
        return FixedRows(run, len(weight), self._sizes[kind])

    def prepare_quantised(self, weight: Int4Weight | Int8Weight, bias: Tensor | None) -> PreparedLinear:
        """Dequantise the weight. Products of its parts would have many shapes, each of which would need trials."""
        return self.prepare_linear(weight.dequantise().to(self.weight_dtype), bias)

    def prepare_attention(self, heads: int, kv_heads: int, head_dim: int, softcap: float | None) -> None:
        if self._attention is None:
            self._attention = ChunkedAttention(heads // kv_heads, kv_heads, head_dim, softcap, self.compute_dtype)
            self._bits.update(self._attention.bits)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return Reference.rms_norm(self, x, weight, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Reference.rope(self, x, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        return (wide / wide.neg().exp_().add_(1)).to(up.dtype).mul_(up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.float()
        bent = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(_GELU).tanh_().add_(1).mul_(0.5)
        return bent.mul_(wide).to(up.dtype).mul_(up)

    def arrange(self, batch: AttentionBatch, block_size: int, zero_block: int) -> AttentionBatch:
        attention = self._prepared()
        return chunked(
            batch, block_size, zero_block, attention.share, attention.padded, attention.most_rows, self.compute_dtype
        )

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: Attended, scale: float, softcap: float | None = None
    ) -> Tensor:
        if not isinstance(batch, ChunkedBatch):
            raise TypeError("a step for deterministic attention has been through `arrange`")
        attention = self._prepared()
        out = torch.empty_like(query)
        for group in batch.chunked:
            keys, values = self.gather(cache, group.block_tables)
            shape = (len(group.block_tables), group.query_len, *query.shape[1:])
            rows = out[group.rows].view(shape)
            attention(rows, query[group.rows].reshape(shape), keys, values, group, scale, softcap)
        return out

    def _prepared(self) -> ChunkedAttention:
        if self._attention is None:
            raise RuntimeError("attention is prepared before it is called")
        return self._attention
