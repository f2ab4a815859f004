"""Qwen3's mixtures of experts (arXiv 2505.09388): Qwen3 with experts in all layers, or in some."""

from __future__ import annotations

from engine.models.decoder import Decoder
from engine.models.experts import read_experts
from engine.models.settings import DecoderSettings
from engine.models.windows import uniform_windows
from engine.text.config import MOST_LAYERS, Config


class Qwen3Moe(Decoder):
    @staticmethod
    def read(config: Config) -> DecoderSettings:
        bias = config.flag("attention_bias")
        width = config.integer("moe_intermediate_size", 768)
        return DecoderSettings.read(
            config,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            # In transformers, too, all layers have a window or none, whatever max_window_layers says.
            windows=uniform_windows(
                config if config.flag("use_sliding_window") else config.replaced(sliding_window=None)
            ),
            experts=read_experts(config, width, count=128, normed=config.flag("norm_topk_prob")),
            dense=_dense(config),
        )


def _dense(config: Config) -> frozenset[int]:
    """The layers without experts: those listed in mlp_only_layers, and all but each decoder_sparse_step-th."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    step = config.integer("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(one) is int for one in listed):
        raise config.wrong("mlp_only_layers", "must be a list of layers")
    return frozenset(i for i in range(layers) if i in listed or (i + 1) % step)
