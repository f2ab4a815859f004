"""A model that says what another says and costs what a larger one costs: for benches where both matter.

Wider by zeros and deeper by layers that add nothing: what is added is computed in full, and multiplied by zero at the
end. RMS norms see a sum of the same squares over more places, which their weights and epsilon make up for.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Llama 135M's, with heads of 32 in place of 64; its vocabulary stays the small one's.
LAYERS, WIDTH, INTERMEDIATE, HEADS, KV_HEADS = 30, 576, 1536, 18, 6
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def inflate(source: Path, folder: Path) -> Path:
    """Write into `folder` the Llama in `source` at Llama 135M's shape. The ratio of its heads must be that of HEADS."""
    config = json.loads((source / "config.json").read_text())
    old = load_file(source / "model.safetensors")
    narrow, heads = config["hidden_size"], config["num_attention_heads"]
    if HEADS * config["num_key_value_heads"] != KV_HEADS * heads:
        raise ValueError(f"{source} has {heads} heads for {config['num_key_value_heads']} of keys")
    size = config["head_dim"]
    shrink = math.sqrt(narrow / WIDTH)
    generator = torch.Generator().manual_seed(0)

    def within(small: Tensor, *shape: int, idle: bool) -> Tensor:
        """`small` in the corner of a larger one; around it zeros or, where what they give comes to nothing, numbers
        like any others (`idle` rows that are multiplied by zero later)."""
        large = torch.randn(*shape, generator=generator) * 0.02 if idle else torch.zeros(*shape)
        large = large.to(small.dtype)
        if small.dim() == 2:
            large[: small.shape[0], small.shape[1] :] = 0
        large[tuple(slice(one) for one in small.shape)] = small
        return large

    def layer(i: int) -> dict[str, Tensor]:
        real = i < config["num_hidden_layers"]

        def of(name: str, rows: int, columns: int, *, idle: bool) -> Tensor:
            key = f"model.layers.{i}.{name}.weight"
            return within(old[key] if real else torch.zeros(0, 0, dtype=dtype), rows, columns, idle=idle)

        found = {
            "self_attn.q_proj": of("self_attn.q_proj", HEADS * size, WIDTH, idle=True),
            "self_attn.k_proj": of("self_attn.k_proj", KV_HEADS * size, WIDTH, idle=True),
            "self_attn.v_proj": of("self_attn.v_proj", KV_HEADS * size, WIDTH, idle=True),
            "self_attn.o_proj": of("self_attn.o_proj", WIDTH, HEADS * size, idle=False),
            "mlp.gate_proj": of("mlp.gate_proj", INTERMEDIATE, WIDTH, idle=True),
            "mlp.up_proj": of("mlp.up_proj", INTERMEDIATE, WIDTH, idle=True),
            "mlp.down_proj": of("mlp.down_proj", WIDTH, INTERMEDIATE, idle=False),
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            weight = old[f"model.layers.{i}.{name}.weight"].float() * shrink if real else torch.ones(narrow)
            found[name] = within(weight, WIDTH, idle=False).to(dtype)
        return {f"model.layers.{i}.{name}.weight": tensor.contiguous() for name, tensor in found.items()}

    table = old["model.embed_tokens.weight"]
    dtype = table.dtype
    made = {"model.embed_tokens.weight": within(table, len(table), WIDTH, idle=False)}
    for i in range(LAYERS):
        made |= layer(i)
    made["model.norm.weight"] = within(old["model.norm.weight"].float() * shrink, WIDTH, idle=False).to(dtype)
    config |= {
        "hidden_size": WIDTH,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": config["rms_norm_eps"] * narrow / WIDTH,
    }
    return _write(folder, source, config, made)


def disturb(source: Path, folder: Path, noise: float) -> Path:
    """Write into `folder` the model in `source` with noise on its matrices, `noise` times as large as they are."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() == 2 and "embed" not in name:
            wide = tensor.float()
            scale = noise * wide.std()
            tensors[name] = (wide + scale * torch.randn(wide.shape, generator=generator)).to(tensor.dtype)
    return _write(folder, source, json.loads((source / "config.json").read_text()), tensors)


def _write(folder: Path, source: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    return folder
