"""The kernel set over the native library: fp32 arithmetic over weights and a KV cache in fp32 or bf16."""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from engine.kernels.groups import AttentionBatch
from engine.kernels.native.library import VERSION, Library
from engine.kernels.ragged import Attended, RaggedBatch
from engine.kernels.reference import PreparedLinear, Reference

#: How long idle threads look for the next call before they sleep: calls of one step come within tens of microseconds.
_SPIN_US = 100
#: Attention takes heads of a multiple of it.
_HEAD_MULTIPLE = 8


class Native(Reference):
    """A row's result depends neither on the rows beside it nor on the number of threads, to the bit."""

    masked = False
    # One group for all that have as many tokens: nothing is padded.
    padding = (float("inf"), 0)

    def __init__(self, dtype: torch.dtype, library: Library, threads: int | None = None) -> None:
        """For weights of `dtype`: bfloat16 are held as such, all others in fp32. `threads`: None is as many as torch
        has."""
        super().__init__(torch.float32)
        self.name = f"native-{library.isa}"
        self._half = dtype == torch.bfloat16
        self.weight_dtype = self.cache_dtype = torch.bfloat16 if self._half else torch.float32
        self._library = library
        self._pool: int = library.pool(threads or torch.get_num_threads(), _SPIN_US)
        weakref.finalize(self, library.free, self._pool)
        self._batch: AttentionBatch | None = None
        self._ragged: RaggedBatch | None = None

    @property
    def identity(self) -> str:
        return f"{self.name}-{VERSION}"

    def use_threads(self, threads: int | None) -> None:
        # What is left for torch is small; threads of its own would spin where those of the pool compute.
        torch.set_num_threads(1)

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        outputs, inputs = weight.shape
        half = int(self._half)
        panels = -(-outputs // self._library.columns)
        packed = torch.zeros(panels * self._library.columns, inputs + inputs % 2 * half, dtype=self.weight_dtype)
        weight = weight.to(self.weight_dtype).contiguous()
        self._library.pack(self._pool, weight.data_ptr(), packed.data_ptr(), half, inputs, outputs)
        run = self._library.linear

        def linear(x: Tensor) -> Tensor:
            x = x.contiguous()
            out = torch.empty(len(x), outputs)
            added = None if bias is None else bias.data_ptr()
            run(
                self._pool,
                x.data_ptr(),
                packed.data_ptr(),
                added,
                out.data_ptr(),
                half,
                len(x),
                inputs,
                outputs,
            )
            return out

        return linear

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != self.compute_dtype:
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._library.norm(
            self._pool, x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        x, residual = x.contiguous(), residual.contiguous()
        self._library.norm(
            self._pool, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), x.data_ptr(), rows, width, eps
        )
        return x, residual

    def norm_heads(self, heads: Tensor, query_weight: Tensor, key_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
        heads = heads.contiguous()
        self._library.norm_heads(
            self._pool,
            heads.data_ptr(),
            query_weight.data_ptr(),
            key_weight.data_ptr(),
            *heads.shape[:2],
            kv_heads,
            heads.shape[2],
            eps,
        )
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, gelu=0)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return self._gate(gate_up, gelu=1)

    def _gate(self, gate_up: Tensor, gelu: int) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, both = gate_up.shape
        out = torch.empty(rows, both // 2)
        self._library.gate(self._pool, gate_up.data_ptr(), out.data_ptr(), gelu, rows, both // 2)
        return out

    def rope_and_write(self, heads: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: Attended) -> Tensor:
        heads, cos, sin = heads.contiguous(), cos.contiguous(), sin.contiguous()
        tokens, count, head_dim = heads.shape
        keys, values = cache[0], cache[1]
        kv_heads = cache.shape[3]
        self._library.rope_and_write(
            self._pool,
            heads.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            int(cache.dtype == torch.bfloat16),
            batch.slots.data_ptr(),
            tokens,
            count,
            kv_heads,
            head_dim,
            cos.shape[-1],
        )
        return heads[:, : count - 2 * kv_heads]

    def paged_attention(
        self, query: Tensor, cache: Tensor, batch: Attended, scale: float, softcap: float | None = None
    ) -> Tensor:
        tokens, heads, head_dim = query.shape
        if head_dim % _HEAD_MULTIPLE:
            return super().paged_attention(query, cache, batch, scale, softcap)
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        step = batch if isinstance(batch, RaggedBatch) else self._flat(batch)
        out = torch.empty(tokens, heads, head_dim)
        own = int(step.query_starts[-1])
        if own < tokens:
            out[own:] = 0
        keys, values = cache[0], cache[1]
        self._library.attention(
            self._pool,
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            int(cache.dtype == torch.bfloat16),
            step.query_starts.data_ptr(),
            step.kv_lens.data_ptr(),
            step.tables.data_ptr(),
            step.tables.stride(0),
            step.table_rows.data_ptr(),
            len(step.kv_lens),
            heads,
            cache.shape[3],
            head_dim,
            cache.shape[2],
            step.window or 0,
            scale,
            softcap or 0.0,
            out.data_ptr(),
        )
        return out

    def _flat(self, batch: AttentionBatch) -> RaggedBatch:
        """The same step without groups; made once for all layers that share it."""
        if self._batch is not batch or self._ragged is None:
            self._batch, self._ragged = batch, _ragged(batch)
        return self._ragged


def _ragged(batch: AttentionBatch) -> RaggedBatch:
    groups = batch.groups
    counts = [group.query_len for group in groups for _ in group.kv_lens]
    lengths = [kv_len for group in groups for kv_len in group.kv_lens]
    tables = np.zeros((len(lengths), max(group.block_tables.shape[1] for group in groups)), np.int32)
    first = 0
    for group in groups:
        sequences, width = group.block_tables.shape
        tables[first : first + sequences, :width] = group.block_tables.numpy()
        first += sequences
    return RaggedBatch(
        slots=batch.slots,
        query_starts=torch.from_numpy(np.cumsum([0, *counts], dtype=np.int32)),
        kv_lens=torch.tensor(lengths, dtype=torch.int32),
        tables=torch.from_numpy(tables),
        table_rows=torch.arange(len(lengths), dtype=torch.int32),
        most_queries=max(counts),
        most_places=max(lengths),
        window=batch.window,
    )
