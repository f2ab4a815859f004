"""Hugging Face folders with random weights, made on the spot: every shape that the engine claims to serve."""

from __future__ import annotations

import json
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

#: Name -> what differs from BASE.
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "mqa": {"num_key_value_heads": 1},
    "wide-heads": {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama3-rope": {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0},
}

#: Standard deviation of the weights: large enough that in these small shapes the likeliest tokens stand well apart.
SPREAD = 0.15


def tensors(settings: dict[str, Any], seed: int = 0, spread: float = SPREAD) -> dict[str, torch.Tensor]:
    """A checkpoint of random numbers for `settings`, by transformers' names."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, settings["dtype"])

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    q = settings["num_attention_heads"] * settings["head_dim"]
    kv = settings["num_key_value_heads"] * settings["head_dim"]
    made = {
        "model.embed_tokens.weight": normal(settings["vocab_size"], hidden),
        "model.norm.weight": 1 + normal(hidden),
    }
    if not settings["tie_word_embeddings"]:
        made["lm_head.weight"] = normal(settings["vocab_size"], hidden)
    for i in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}{norm}.weight"] = 1 + normal(hidden)
        for name, outputs, inputs in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
            made[f"{layer}self_attn.{name}_proj.weight"] = normal(outputs, inputs)
            if settings["attention_bias"]:
                made[f"{layer}self_attn.{name}_proj.bias"] = normal(outputs)
        for name, outputs, inputs in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            made[f"{layer}mlp.{name}_proj.weight"] = normal(outputs, inputs)
            if settings["mlp_bias"]:
                made[f"{layer}mlp.{name}_proj.bias"] = normal(outputs)
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
