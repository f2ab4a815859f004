"""Hugging Face folders with random weights, made on the spot: every shape that the engine claims to serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|end|>"

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "float32",
}

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: Of 8 dimensions that turn, as the heads of BASE have them by half.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 2.0, 4.0, 7.0],
}

#: Name -> what differs from BASE: every shape of Llama.
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama3-rope": {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0},
}


def family(architecture: str, **changes: Any) -> dict[str, Any]:
    named = {"Gemma3ForCausalLM": "gemma3_text", "Qwen3MoeForCausalLM": "qwen3_moe"}
    model_type = named.get(architecture, architecture.split("For")[0].lower())
    told = {"architectures": [architecture], "model_type": model_type}
    return told | {"num_hidden_layers": 4, "pad_token_id": 0} | changes


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 20,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
#: Name -> what differs from BASE: the other families, with their windows and without. Windows are no multiple of a
#: block, and shorter than most of the prompts that are tried.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": family("MistralForCausalLM", sliding_window=None, tie_word_embeddings=False),
    "mistral-window": family("MistralForCausalLM", sliding_window=21),
    "qwen2": family("Qwen2ForCausalLM", use_sliding_window=False, max_window_layers=2),
    "qwen2-window": family(
        "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=18, max_window_layers=2, tie_word_embeddings=False
    ),
    "qwen3": family("Qwen3ForCausalLM", head_dim=32),
    "mixtral": family(
        "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=21, tie_word_embeddings=False
    ),
    "qwen3-moe": family("Qwen3MoeForCausalLM", **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe-steps": family(
        "Qwen3MoeForCausalLM", **_EXPERTS, decoder_sparse_step=2, use_sliding_window=True, sliding_window=21
    ),
    "phi3": family("Phi3ForCausalLM", tie_word_embeddings=False, sliding_window=70),
    "phi3-longrope": family(
        "Phi3ForCausalLM",
        partial_rotary_factor=0.5,
        original_max_position_embeddings=60,
        rope_scaling=LONGROPE,
        sliding_window=None,
    ),
    "gemma2": family("Gemma2ForCausalLM", **_GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=6.0),
    "gemma3": family(
        "Gemma3ForCausalLM",
        **_GEMMA,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
}

#: Standard deviation of the weights: large enough that in these small shapes the likeliest tokens stand well apart.
SPREAD = 0.15


def tensors(settings: dict[str, Any], seed: int = 0, spread: float = SPREAD) -> dict[str, torch.Tensor]:
    """A checkpoint of random numbers for `settings`, by transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, settings["dtype"])
    kind = settings["architectures"][0].split("For")[0]
    gemma = kind in ("Gemma2", "Gemma3")

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    def norm(width: int) -> torch.Tensor:
        return normal(width) if gemma else 1 + normal(width)

    hidden, inner, head_dim = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    q, kv = settings["num_attention_heads"] * head_dim, settings["num_key_value_heads"] * head_dim
    made = {"model.embed_tokens.weight": normal(settings["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    if not settings["tie_word_embeddings"]:
        made["lm_head.weight"] = normal(settings["vocab_size"], hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    attention = [("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)]
    feed = [("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)]
    if kind == "Phi3":
        attention = [("qkv", q + 2 * kv, hidden), ("o", hidden, q)]
        feed = [("gate_up", 2 * inner, hidden), ("down", hidden, inner)]
    biased = {"q", "k", "v"} if kind == "Qwen2" else {"q", "k", "v", "o"} if settings["attention_bias"] else set()
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in norms:
            made[f"{layer}{name}.weight"] = norm(hidden)
        if kind in ("Qwen3", "Qwen3Moe", "Gemma3"):
            made |= {f"{layer}self_attn.{name}_norm.weight": norm(head_dim) for name in "qk"}
        for name, outputs, inputs in attention:
            made[f"{layer}self_attn.{name}_proj.weight"] = normal(outputs, inputs)
            if name in biased:
                made[f"{layer}self_attn.{name}_proj.bias"] = normal(outputs)
        if is_sparse(settings, i):
            made |= _experts(settings, layer, normal)
            continue
        for name, outputs, inputs in feed:
            made[f"{layer}mlp.{name}_proj.weight"] = normal(outputs, inputs)
            if settings["mlp_bias"]:
                made[f"{layer}mlp.{name}_proj.bias"] = normal(outputs)
    return made


def is_sparse(settings: dict[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    if "num_experts_per_tok" not in settings or layer in settings.get("mlp_only_layers", []):
        return False
    return (layer + 1) % settings.get("decoder_sparse_step", 1) == 0


def _experts(settings: dict[str, Any], layer: str, normal: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """A router and experts, as published checkpoints name them. The router tells rows well apart."""
    hidden = settings["hidden_size"]
    block, names = f"{layer}mlp.", ("gate_proj", "up_proj", "down_proj")
    inner, count = settings.get("moe_intermediate_size"), settings.get("num_experts")
    if settings["model_type"] == "mixtral":
        block, names = f"{layer}block_sparse_moe.", ("w1", "w3", "w2")
        inner, count = settings["intermediate_size"], settings["num_local_experts"]
    made = {f"{block}gate.weight": normal(count, hidden)}
    for i in range(count):
        for name, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            made[f"{block}experts.{i}.{name}.weight"] = normal(*shape)
    return made


def write_model(
    folder: Path, *, seed: int = 0, spread: float = SPREAD, shards: int = 1, tokenizer: bool = True, **changes: Any
) -> Path:
    """Write config.json, safetensors (in `shards` files) and a byte-level tokenizer; BASE with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = BASE | changes
    (folder / "config.json").write_text(json.dumps(settings))
    made = tensors(settings, seed, spread)
    if shards == 1:
        save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(made)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            held = names[i::shards]
            save_file({name: made[name] for name in held}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(held, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if tokenizer:
        write_tokenizer(folder, settings["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Byte-level BPE: END, the 256 bytes, then merges learnt from this very file, up to `vocab_size`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator([Path(__file__).read_text(encoding="utf-8")], trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
