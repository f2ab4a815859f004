"""The model families: for each architecture, how its settings are read, and what else differs from other families.

A family with code of its own has a file beside this one (gemma.py).
"""

from __future__ import annotations

import re

from engine.models.decoder import Family
from engine.models.gemma import GemmaLayer, read_gemma2, read_gemma3, rename_gemma3
from engine.models.settings import DecoderSettings, qwen_windows, read_experts, uniform_windows
from engine.text.config import MOST_LAYERS, Config

#: The names of an expert's matrices in Mixtral's checkpoints, and the engine's.
_MIXTRAL_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"(\.experts\.\d+\.)(w[123])(\.)")


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


_GEMMA3 = Family(read_gemma3, layer=GemmaLayer, rename=rename_gemma3)

#: The families by the architecture that config.json names.
FAMILIES = {
    "LlamaForCausalLM": Family(_llama),
    "MistralForCausalLM": Family(_mistral),
    "MixtralForCausalLM": Family(_mixtral, rename=_rename_mixtral),
    "Qwen2ForCausalLM": Family(_qwen2),
    "Qwen3ForCausalLM": Family(_qwen3),
    "Qwen3MoeForCausalLM": Family(_qwen3_moe),
    "Phi3ForCausalLM": Family(_phi3),
    "Gemma2ForCausalLM": Family(read_gemma2, layer=GemmaLayer),
    "Gemma3ForCausalLM": _GEMMA3,
    # Only the text model; images are not supported.
    "Gemma3ForConditionalGeneration": _GEMMA3,
}
