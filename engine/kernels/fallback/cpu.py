"""The CPU set in torch's operations, with weights packed once by oneDNN and scratch memory to gather into."""

from __future__ import annotations

import torch
from torch import Tensor

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
