"""Gemma 2 and 3: a layer that norms outputs too, windows in some layers, capped scores or normed queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.models.decoder import DecoderLayer
from engine.models.settings import DecoderSettings, mixed_windows, read_activation
from engine.text.config import MOST_CONTEXT, MOST_LAYERS, Config

#: The decoder's name prefixes in checkpoints with images (transformers 5 in memory, and on disk), and the engine's.
_DECODER = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
#: The prefixes of other tensors in such checkpoints, which are skipped.
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class GemmaLayer(DecoderLayer):
    """A layer that also norms the outputs of attention and feed-forward before adding them."""

    NORMS: ClassVar[Mapping[str, str]] = {
        "input": "input_layernorm",
        "middle": "pre_feedforward_layernorm",
        "attended": "post_attention_layernorm",
        "fed": "post_feedforward_layernorm",
    }


def read_gemma2(config: Config) -> DecoderSettings:
    """Gemma 2 (arXiv 2408.00118): a window in every other layer; capped scores."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    if config.flag("use_bidirectional_attention"):
        raise config.wrong("use_bidirectional_attention", "is not supported: tokens would see those after them")
    return DecoderSettings.read(
        config,
        windows=mixed_windows(config, [i % 2 == 0 for i in range(layers)]),
        attention_softcap=config.optional("attn_logit_softcapping"),
        **_shared_traits(config),
    )


def read_gemma3(config: Config) -> DecoderSettings:
    """Gemma 3's text model (arXiv 2503.19786): five of six layers have a window and their own rope; q and k are
    normed. EmbeddingGemma (arXiv 2509.20354) is one whose tokens see both sides, up to half of sliding_window away."""
    if "attn_logit_softcapping" in config:
        raise config.wrong("attn_logit_softcapping", "is not supported: Gemma 3's attention has no such cap")
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    period = config.integer("sliding_window_pattern", high=MOST_LAYERS)
    bidirectional = config.flag("use_bidirectional_attention")
    if bidirectional:
        config = config.replaced(sliding_window=config.integer("sliding_window", high=MOST_CONTEXT) // 2 + 1)
    return DecoderSettings.read(
        config,
        windows=mixed_windows(config, [(i + 1) % period != 0 for i in range(layers)]),
        ropes=(config.rope("full_attention"), config.rope("sliding_attention")),
        qk_norm=True,
        bidirectional=bidirectional,
        **_shared_traits(config),
    )


def rename_gemma3(name: str) -> str | None:
    """The name of a tensor of the text model, without the prefixes of checkpoints with images; None for images'."""
    if name.startswith(_VISION):
        return None
    for theirs, ours in _DECODER.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _shared_traits(config: Config) -> dict[str, Any]:
    """The settings that Gemma 2 and 3 have in common."""
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
