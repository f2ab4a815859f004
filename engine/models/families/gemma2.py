"""Gemma 2 (arXiv 2408.00118): a window in every other layer; norms before and after each block; capped scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels import Kernels, LayerParts, RaggedBatch
from engine.layers import RmsNorm
from engine.models.decoder import Decoder, DecoderLayer
from engine.models.settings import DecoderSettings, read_activation
from engine.models.windows import mixed_windows
from engine.text.config import MOST_LAYERS, Config


class GemmaLayer(DecoderLayer):
    """A layer that also norms the outputs of attention and feed-forward before adding them."""

    NORMS = ("input_layernorm", "pre_feedforward_layernorm")

    def __init__(self, c: DecoderSettings, kernels: Kernels, device: torch.device) -> None:
        super().__init__(c, kernels, device)
        self._attended_norm = self._norm(c, kernels, device)
        self._fed_norm = self._norm(c, kernels, device)

    def norms(self) -> dict[str, RmsNorm]:
        return super().norms() | {
            "post_attention_layernorm": self._attended_norm,
            "post_feedforward_layernorm": self._fed_norm,
        }

    def parts(self, group: int, place: int, rope: int) -> LayerParts:
        found = super().parts(group, place, rope)
        return replace(found, attended_norm=self._attended_norm.weight, fed_norm=self._fed_norm.weight)

    def attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor, batch: RaggedBatch) -> Tensor:
        return self._attended_norm(super().attend(x, rotation, cache, batch))

    def feed(self, x: Tensor) -> Tensor:
        return self._fed_norm(super().feed(x))


class Gemma2(Decoder):
    LAYER = GemmaLayer

    @staticmethod
    def read(config: Config) -> DecoderSettings:
        layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
        return DecoderSettings.read(
            config,
            windows=mixed_windows(config, [i % 2 == 0 for i in range(layers)]),
            attention_softcap=config.optional("attn_logit_softcapping"),
            **gemma_traits(config),
        )


def gemma_traits(config: Config) -> dict[str, Any]:
    """The settings that Gemma 2 and 3 have in common."""
    if config.flag("use_bidirectional_attention"):
        raise config.wrong("use_bidirectional_attention", "is not supported: tokens would see those after them")
    bias = config.flag("attention_bias")
    return {
        "activation": read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "qkv_bias": bias,
        "output_bias": bias,
        "norm_offset": 1.0,
        "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "logit_softcap": config.optional("final_logit_softcapping"),
        "scales_embedding": True,
    }
