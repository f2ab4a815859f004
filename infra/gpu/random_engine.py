"""Makes engines and transformers models with random weights on the device, without a checkpoint of 16 GB."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig
from engine.kernels import select
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from engine.text.config import Config
from infra.gpu.shapes import SHAPES

#: The standard deviation of weights, as in usual initialisation. Sums of products stay near the size of one.
_SPREAD = 0.02


def random_engine(shape: str, config: EngineConfig, device: torch.device) -> Engine:
    """An engine without a tokenizer, with random bf16 weights (held in fp32 if a CPU has no bf16)."""
    settings = SHAPES[shape]
    dtype = torch.bfloat16
    kernels = select(device, dtype, config.kernels, config.quantization, config.deterministic, config.kv_cache_dtype)
    model = Decoder(FAMILIES["LlamaForCausalLM"], Config.of_model(settings), kernels, dtype, device)
    torch.manual_seed(1234)
    for name, place in model.weights().items():
        place.fill_(1.0) if "norm" in name else place.normal_(0.0, _SPREAD)
    model.pack()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(settings))
        return Engine(model, config, folder=Path(folder), version="random")


def random_peer(shape: str, device: torch.device) -> Any:
    """The same model in transformers."""
    import transformers

    config = transformers.LlamaConfig(**{k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "dtype")})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()
