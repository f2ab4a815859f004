"""Self-attention over the paged cache: one packed q, k, v product, rotation, cache write, attention, output."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import AttentionBatch, Kernels
from engine.layers.linear import Linear


class Attention:
    def __init__(
        self,
        kernels: Kernels,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._heads = heads
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._scale = head_dim**-0.5
        kv_width = kv_heads * head_dim
        self._qkv = Linear(
            kernels,
            width,
            {"q_proj": heads * head_dim, "k_proj": kv_width, "v_proj": kv_width},
            bias=bias,
            device=device,
        )
        self._output = Linear(kernels, heads * head_dim, {"o_proj": width}, bias=bias, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return self._qkv.weights(prefix) | self._output.weights(prefix)

    def pack(self) -> None:
        self._qkv.pack()
        self._output.pack()

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor, batch: AttentionBatch) -> Tensor:
        """`x` [tokens, width]; `rotation` from Rope; `cache` this layer's [2, blocks, block, kv_heads, head_dim]."""
        heads = self._qkv(x).view(len(x), -1, self._head_dim)
        # Queries and keys turn by the same angles: one operation for both.
        rotated = self._kernels.rope(heads[:, : self._heads + self._kv_heads], *rotation)
        self._kernels.write_kv(rotated[:, self._heads :], heads[:, self._heads + self._kv_heads :], cache, batch.slots)
        out = self._kernels.paged_attention(rotated[:, : self._heads], cache, batch, self._scale)
        return self._output(out.reshape(len(x), -1))
