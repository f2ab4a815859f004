"""Folders of random adapters in PEFT's format, written without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.random_models import BASE

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def tensors(rank: int = 2, seed: int = 0, spread: float = 0.3, **changes: Any) -> dict[str, Tensor]:
    """A and B of each layer's q_proj and down_proj, for a model of random_models.BASE with `changes`."""
    settings = BASE | changes
    width, inner = settings["hidden_size"], settings["intermediate_size"]
    query = settings["num_attention_heads"] * settings["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for layer in range(settings["num_hidden_layers"]):
        for module, inputs, outputs in (("self_attn.q_proj", width, query), ("mlp.down_proj", inner, width)):
            name = f"base_model.model.model.layers.{layer}.{module}"
            values[f"{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * spread
            values[f"{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * spread
    return values


def too_large() -> dict[str, Tensor]:
    """`tensors` with whose `down_proj` hidden states become so large that their squares overflow, while they do not."""
    return {name: value * (1e22 if "down_proj.lora_B" in name else 1) for name, value in tensors().items()}


def stacked(settings: dict[str, Any], rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """A and B of all experts of each layer, for a Mixtral of `settings` (`target_parameters`)."""
    settings = BASE | settings
    width, inner, ranks = settings["hidden_size"], settings["intermediate_size"], rank * settings["num_local_experts"]
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for layer in range(settings["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.mlp.experts"
        for module, inputs, outputs in ((f"{name}.base_layer", width, 2 * inner), (name, inner, width)):
            values[f"{module}.lora_A.weight"] = torch.randn(ranks, inputs, generator=generator) * 0.3
            values[f"{module}.lora_B.weight"] = torch.randn(outputs, ranks, generator=generator) * 0.3
    return values


def write_adapter(folder: Path, values: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Write an adapter's folder: CONFIG with the changes of `config`, and `values`, else `tensors()`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors() if values is None else values, folder / "adapter_model.safetensors")
    return folder
