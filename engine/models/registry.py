"""Which architecture is whose: one line a family."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import AttentionBatch, Kernels, select
from engine.models.loader import load_weights

#: Architecture as config.json names it -> module and class.
FAMILIES = {
    "LlamaForCausalLM": "engine.models.llama:Llama",
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model(Protocol):
    """What the runner asks of a family."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int

    def __init__(self, settings: dict[str, Any], kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        """Empty layers for `settings`, the content of config.json. Raises ModelError naming what it cannot serve."""

    def weights(self) -> dict[str, Tensor]:
        """Checkpoint tensor name -> where to copy it."""

    def unused(self, name: str) -> bool:
        """Whether a checkpoint may carry this tensor although `weights` does not want it."""

    def pack(self) -> None:
        """Called once, when every tensor of `weights` has been filled."""

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: AttentionBatch, cache: Tensor, wanted: Tensor
    ) -> Tensor:
        """The last hidden states [wanted, width], normed, of the token rows whose indexes are in `wanted`.

        `tokens`, `positions`: int64 [tokens]. `cache`: [layers, 2, blocks, block_size, kv_heads, head_dim].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of what `forward` gave; apart, so that those of a long prompt come in pieces."""


def load_model(folder: str | Path, dtype: str, device: torch.device, kernels: type[Kernels] | None = None) -> Model:
    """Load the checkpoint in `folder`. `dtype` may be "auto": the one that config.json names.

    `kernels` overrides the set that `engine.kernels.select` would choose. Raises ModelError.
    """
    path = Path(folder)
    settings = read_settings(path)
    names = settings.get("architectures") or []
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    if family is None:
        raise ModelError(
            f"{path}: config.json names the architectures {names}; supported are {', '.join(sorted(FAMILIES))}"
        )
    if settings.get("quantization_config") is not None:
        raise ModelError(f"{path}: config.json has a quantization_config; quantised checkpoints are not supported")
    weight_dtype = _dtype(path, settings, dtype)
    kernel_set = kernels(weight_dtype) if kernels is not None else select(device, weight_dtype)
    module, name = family.split(":")
    model: Model = getattr(import_module(module), name)(settings, kernel_set, weight_dtype, device)
    load_weights(path, model.weights(), weight_dtype, model.unused)
    model.pack()
    return model


def read_settings(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises ModelError where there is none, or it is not a JSON object."""
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds a {type(settings).__name__} where an object is expected")
    return settings


def _dtype(path: Path, settings: dict[str, Any], asked: str) -> torch.dtype:
    name = asked
    if asked == "auto":
        # transformers 5 writes "dtype", earlier ones "torch_dtype"; none at all meant float32.
        name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{path}: dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]
