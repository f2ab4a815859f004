"""The model families: for each architecture, how its settings are read, and what else differs from other families."""

from __future__ import annotations

import re
from typing import Any

from engine.models.decoder import Family
from engine.models.settings import (
    DecoderSettings,
    mixed_windows,
    qwen_windows,
    read_activation,
    read_experts,
    uniform_windows,
)
from engine.text.config import MOST_CONTEXT, MOST_LAYERS, Config

#: The names of an expert's matrices in Mixtral's checkpoints, and the engine's.
_MIXTRAL_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(\.experts\.\d+\.)(w[123])(\.)")
#: The norms of a layer that also norms the outputs of attention and feed-forward before adding them.
_GEMMA_NORMS = {
    "input": "input_layernorm",
    "middle": "pre_feedforward_layernorm",
    "attended": "post_attention_layernorm",
    "fed": "post_feedforward_layernorm",
}
#: The decoder's name prefixes in checkpoints with images (transformers 5 in memory, and on disk), and the engine's.
_GEMMA_DECODER = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
#: The prefixes of other tensors in such checkpoints, which are skipped.
_GEMMA_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def _llama(config: Config) -> DecoderSettings:
    """Llama (arXiv 2302.13971, 2407.21783), as transformers' LlamaForCausalLM lays it out."""
    bias = config.flag("attention_bias")
    return DecoderSettings.read(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def _mistral(config: Config) -> DecoderSettings:
    """Mistral (arXiv 2310.06825): Llama; the first version has a window in all layers."""
    return DecoderSettings.read(config, windows=uniform_windows(config))


def _mixtral(config: Config) -> DecoderSettings:
    """Mixtral (arXiv 2401.04088): Mistral with experts in all layers."""
    experts = read_experts(config, config.integer("intermediate_size"), count=8, normed=True)
    return DecoderSettings.read(config, windows=uniform_windows(config), experts=experts)


def _rename_mixtral(name: str) -> str:
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _MIXTRAL_EXPERT.sub(lambda match: match[1] + _MIXTRAL_MATRICES[match[2]] + match[3], name)


def _phi3(config: Config) -> DecoderSettings:
    """Phi-3 and Phi-4 (arXiv 2404.14219, 2503.01743), dense: fused projections, LongRoPE, partial rotary embedding."""
    rope = config.rope()
    kind = rope.text("rope_type")
    # A Phi-3's "yarn" has always meant LongRoPE; transformers reads it so, too.
    if kind not in ("default", "longrope", "su", "yarn"):
        raise rope.wrong("rope_type", "is not supported for Phi-3; 'default' and 'longrope' are")
    if kind == "yarn":
        rope = rope.replaced(rope_type="longrope")
    return DecoderSettings.read(config, fused=True, windows=uniform_windows(config), ropes=(rope,))


def _qwen2(config: Config) -> DecoderSettings:
    """Qwen2 and 2.5 (arXiv 2407.10671, 2412.15115): Llama with biases on q, k and v, and windows in the later
    layers."""
    return DecoderSettings.read(config, qkv_bias=True, windows=qwen_windows(config))


def _qwen3(config: Config) -> DecoderSettings:
    """Qwen3 (arXiv 2505.09388), its dense models: queries and keys are normed head by head."""
    bias = config.flag("attention_bias")
    return DecoderSettings.read(config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=qwen_windows(config))


def _qwen3_moe(config: Config) -> DecoderSettings:
    """Qwen3's mixtures of experts (arXiv 2505.09388): Qwen3 with experts in all layers, or in some."""
    bias = config.flag("attention_bias")
    width = config.integer("moe_intermediate_size", 768)
    return DecoderSettings.read(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        # In transformers, too, all layers have a window or none, whatever max_window_layers says.
        windows=uniform_windows(config if config.flag("use_sliding_window") else config.replaced(sliding_window=None)),
        experts=read_experts(config, width, count=128, normed=config.flag("norm_topk_prob")),
        dense=_dense_layers(config),
    )


def _dense_layers(config: Config) -> frozenset[int]:
    """The layers without experts: those listed in mlp_only_layers, and all but each decoder_sparse_step-th."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    step = config.integer("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise config.wrong("mlp_only_layers", "must be a list of layers")
    return frozenset(i for i in range(layers) if i in listed or (i + 1) % step)


def _gemma2(config: Config) -> DecoderSettings:
    """Gemma 2 (arXiv 2408.00118): a window in every other layer; capped scores."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    if config.flag("use_bidirectional_attention"):
        raise config.wrong("use_bidirectional_attention", "is not supported: tokens would see those after them")
    return DecoderSettings.read(
        config,
        windows=mixed_windows(config, [i % 2 == 0 for i in range(layers)]),
        attention_softcap=config.optional("attn_logit_softcapping"),
        **_gemma_traits(config),
    )


def _gemma3(config: Config) -> DecoderSettings:
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
        **_gemma_traits(config),
    )


def _rename_gemma3(name: str) -> str | None:
    """The name of a tensor of the text model, without the prefixes of checkpoints with images; None for images'."""
    if name.startswith(_GEMMA_VISION):
        return None
    for theirs, ours in _GEMMA_DECODER.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _gemma_traits(config: Config) -> dict[str, Any]:
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


_GEMMA3 = Family(_gemma3, norms=_GEMMA_NORMS, rename=_rename_gemma3)

#: The families by the architecture that config.json names.
FAMILIES = {
    "LlamaForCausalLM": Family(_llama),
    "MistralForCausalLM": Family(_mistral),
    "MixtralForCausalLM": Family(_mixtral, rename=_rename_mixtral),
    "Qwen2ForCausalLM": Family(_qwen2),
    "Qwen3ForCausalLM": Family(_qwen3),
    "Qwen3MoeForCausalLM": Family(_qwen3_moe),
    "Phi3ForCausalLM": Family(_phi3),
    "Gemma2ForCausalLM": Family(_gemma2, norms=_GEMMA_NORMS),
    "Gemma3ForCausalLM": _GEMMA3,
    # Only the text model; images are not supported.
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
