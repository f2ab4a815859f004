"""The Llama family (arXiv 2302.13971, 2407.21783), as transformers' LlamaForCausalLM lays it out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels import AttentionBatch, Kernels
from engine.layers import Attention, Embedding, GatedMlp, Linear, RmsNorm, Rope
from engine.models.settings import DecoderSettings


class Llama:
    def __init__(self, settings: dict[str, Any], kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        c = DecoderSettings.read(settings)
        self.kernels, self.device, self.dtype = kernels, device, dtype
        self.num_layers, self.kv_heads, self.head_dim = c.layers, c.kv_heads, c.head_dim
        self.vocab_size, self.context_length = c.vocab_size, c.context_length
        self._embedding = Embedding(kernels, c.vocab_size, c.hidden_size, tied=c.tied, dtype=dtype, device=device)
        self._rope = Rope(kernels, c.head_dim, c.rope_theta, c.rope_scaling, device=device)
        self._layers = [_Layer(c, kernels, device) for _ in range(c.layers)]
        self._norm = RmsNorm(kernels, c.hidden_size, c.norm_eps, device=device)
        self._head = (
            None if c.tied else Linear(kernels, c.hidden_size, {"lm_head": c.vocab_size}, bias=False, device=device)
        )

    def weights(self) -> dict[str, Tensor]:
        places = self._embedding.weights("model.embed_tokens.") | self._norm.weights("model.norm.")
        for i, layer in enumerate(self._layers):
            places |= layer.weights(f"model.layers.{i}.")
        if self._head is not None:
            places |= self._head.weights("")
        return places

    def unused(self, name: str) -> bool:
        # Old checkpoints carry the rotary frequencies; tied ones often a copy of the table as head.
        return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and self._head is None)

    def pack(self) -> None:
        self._embedding.pack()
        for layer in self._layers:
            layer.pack()
        if self._head is not None:
            self._head.pack()

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, cache: Tensor, wanted: Tensor
    ) -> Tensor:
        rotation = self._rope(positions)
        residual = self._embedding(tokens)
        x = self._layers[0].input_norm(residual)
        for i, layer in enumerate(self._layers):
            x = layer.attention(x, rotation, cache[i], attention)
            x, residual = layer.post_norm.add(x, residual)
            x = layer.mlp(x)
            # The sum and the next layer's norm are one operation, so the norm is reached for across the border.
            after = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._norm
            x, residual = after.add(x, residual)
        return x[wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        head = self._head or self._embedding.head
        if head is None:
            raise RuntimeError("a model is packed before it runs")
        return head(hidden)


class _Layer:
    def __init__(self, c: DecoderSettings, kernels: Kernels, device: torch.device) -> None:
        self.input_norm = RmsNorm(kernels, c.hidden_size, c.norm_eps, device=device)
        self.attention = Attention(
            kernels, c.hidden_size, c.heads, c.kv_heads, c.head_dim, bias=c.attention_bias, device=device
        )
        self.post_norm = RmsNorm(kernels, c.hidden_size, c.norm_eps, device=device)
        self.mlp = GatedMlp(kernels, c.hidden_size, c.intermediate_size, bias=c.mlp_bias, device=device)

    def weights(self, prefix: str) -> dict[str, Tensor]:
        return (
            self.input_norm.weights(f"{prefix}input_layernorm.")
            | self.attention.weights(f"{prefix}self_attn.")
            | self.post_norm.weights(f"{prefix}post_attention_layernorm.")
            | self.mlp.weights(f"{prefix}mlp.")
        )

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()
