"""The CPU set made of torch's operations, with weights packed once by oneDNN. Decode steps read keys and values in
place; other steps gather them into scratch memory that is reused."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.fallback.padded import PaddedGroup
from engine.kernels.fallback.pieces import piece
from engine.kernels.fallback.sampled import MOST_SHARED, SampledGroup, forewarned, sampled, sampled_attention
from engine.kernels.fallback.sdpa import Sdpa
from engine.kernels.layer import PreparedLinear


def computes_natively(dtype: torch.dtype) -> bool:
    """Whether this CPU has matrix instructions for `dtype`, according to torch.

    Without them bf16 products are emulated. A product of 32 rows then took 6 times as long as in fp32 (AVX2, torch
    2.13).
    """
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32


@lru_cache(maxsize=16)
def _root(eps: float) -> Tensor:
    return torch.tensor(eps).sqrt_()


def _gated(activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    rows, width = gate.shape
    size = piece(rows, width)
    if size == rows:
        return activate(gate).mul_(up)
    out = gate.new_empty(rows, width)
    for first in range(0, rows, size):
        part = slice(first, first + size)
        torch.mul(activate(gate[part]), up[part], out=out[part])
    return out


class Cpu(Sdpa):
    name = "cpu"
    # Attention spends most of its time gathering, so pad little.
    padding = (1.25, 64)

    def __init__(self, compute_dtype: torch.dtype) -> None:
        super().__init__(compute_dtype)
        self._packs = torch._C._has_mkldnn and computes_natively(compute_dtype)
        self._scratch = torch.empty(2, 0, dtype=compute_dtype)
        # (query heads, KV heads) of every layer. None if decode steps gather, too.
        self._heads: tuple[int, int] | None = None

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        if not self._packs:
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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        # torch's own rms_norm runs eight operations on a CPU, and takes twice as long.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
        return x.div(length.hypot_(_root(eps))).mul_(weight)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.shape[-1] < x.shape[-1]:
            return super().rope(x, cos, sin)
        # One pass over the data less than a separate product and sum.
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(F.silu, gate_up)

    def gelu_tanh_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(partial(F.gelu, approximate="tanh"), gate_up)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def prepare_attention(self, heads: int, kv_heads: int, head_dim: int, softcap: float | None) -> None:
        # torch's sparse product supports only fp32.
        if self.cache_dtype == torch.float32 and heads // kv_heads <= MOST_SHARED:
            forewarned()
            self._heads = heads, kv_heads

    def arrange_group(self, group: PaddedGroup, window: int | None, block_size: int, zero_block: int) -> PaddedGroup:
        if self._heads is None or group.query_len > 1:
            return super().arrange_group(group, window, block_size, zero_block)
        return sampled(group, window, block_size, zero_block, *self._heads)

    def attend_group(
        self, query: Tensor, cache: Tensor, group: PaddedGroup, scale: float, softcap: float | None
    ) -> Tensor:
        if isinstance(group, SampledGroup):
            return sampled_attention(query, cache, group, scale, softcap)
        return super().attend_group(query, cache, group, scale, softcap)

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
