"""Self-attention over the paged KV cache: a packed q, k, v product, rotation, cache write, attention, output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels import Kernels, RaggedBatch
from engine.layers.adapted import AdaptedRows
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class AttentionShape:
    width: int
    """The width of input and output rows."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """The factor of attention scores."""
    softcap: float | None = None
    """The bound of attention scores: cap * tanh(score / cap) (arXiv 2408.00118). None for no bound."""
    qkv_bias: bool = False
    output_bias: bool = False
    fused: bool = False
    """Whether the checkpoint has one matrix for q, k and v."""


class Attention:
    def __init__(self, kernels: Kernels, shape: AttentionShape, *, device: torch.device) -> None:
        self._kernels = kernels
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = {"qkv_proj": q + 2 * kv} if shape.fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv = Linear(kernels, shape.width, parts, bias=shape.qkv_bias, device=device)
        self.output = Linear(kernels, q, {"o_proj": shape.width}, bias=shape.output_bias, device=device)

    def linears(self, prefix: str) -> list[tuple[str, Linear]]:
        return [(prefix, self.qkv), (prefix, self.output)]

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return self.qkv.weights(prefix) | self.output.weights(prefix)

    def pack(self) -> None:
        self.qkv.pack()
        self.output.pack()
        shape = self.shape
        self._kernels.prepare_attention(shape.heads, shape.kv_heads, shape.head_dim, shape.softcap)

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: Tensor,
        batch: RaggedBatch,
        adapters: AdaptedRows | None = None,
    ) -> Tensor:
        """`x`: [tokens, width]. `rotation`: from Rope. `cache`: this layer's, [2, blocks, block, kv_heads,
        head_dim]."""
        shape, kernels = self.shape, self._kernels
        heads = self._prepared(self.qkv(x, adapters).view(len(x), -1, shape.head_dim))
        query = kernels.rope_and_write(heads, *rotation, cache, batch)
        out = kernels.paged_attention(query, cache, batch, shape.scale, shape.softcap)
        return self.output(out.reshape(len(x), -1), adapters)

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """The norm weights of queries and keys, applied before the rotation. None if there are none."""
        return None

    def _prepared(self, heads: Tensor) -> Tensor:
        """Queries, keys and values, [tokens, heads + 2 * kv_heads, head_dim], ready for the rotation."""
        return heads


class NormedAttention(Attention):
    """Attention that norms each head's query and key before the rotation, with one weight for queries and one for
    keys."""

    def __init__(
        self, kernels: Kernels, shape: AttentionShape, *, eps: float, offset: float, device: torch.device
    ) -> None:
        super().__init__(kernels, shape, device=device)
        self._eps = eps
        self._query_norm = RmsNorm(kernels, shape.head_dim, eps, offset=offset, device=device)
        self._key_norm = RmsNorm(kernels, shape.head_dim, eps, offset=offset, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return (
            super().weights(prefix)
            | self._query_norm.weights(f"{prefix}q_norm.")
            | self._key_norm.weights(f"{prefix}k_norm.")
        )

    def pack(self) -> None:
        super().pack()
        self._query_norm.pack()
        self._key_norm.pack()

    @property
    def head_norms(self) -> tuple[Tensor, Tensor]:
        return self._query_norm.weight, self._key_norm.weight

    def _prepared(self, heads: Tensor) -> Tensor:
        return self._kernels.norm_heads(heads, *self.head_norms, self.shape.kv_heads, self._eps)
