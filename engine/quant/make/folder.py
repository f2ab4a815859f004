"""Writes a checkpoint folder in compressed-tensors' "pack-quantized" format, which formats/stored.py reads."""

from __future__ import annotations

import json
from pathlib import Path
from stat import S_IMODE
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.quant.formats import Matrix
from engine.text.tensors import INDEX, SINGLE

#: The most bytes of tensors in one file.
_FULL = 4 << 30
#: The targets of the head's group. With a tied head, only the embedding exists.
_HEADS = ["re:.*lm_head$", "re:.*embed_tokens$"]


class Writer:
    """Writes tensors in the order of `put`, in as many files as needed. The folder is complete only after `finish`. All
    methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._weight_map: dict[str, str] = {}
        self._bytes = self._total = 0

    def put(self, name: str, tensor: Tensor) -> None:
        if self._bytes and self._bytes + tensor.nbytes > _FULL:
            self._flush()
        self._pending[name] = tensor.contiguous().cpu()
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self, config: dict[str, Any]) -> None:
        """Write the remaining tensors and config.json."""
        self._flush()
        if len(set(self._weight_map.values())) == 1:
            (self._folder / _shard(1)).rename(self._folder / SINGLE)
        else:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        if not self._pending:
            return
        name = _shard(len(set(self._weight_map.values())) + 1)
        _save(self._pending, self._folder / name)
        self._weight_map |= dict.fromkeys(self._pending, name)
        self._pending, self._bytes = {}, 0


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.touch()
    # safetensors makes files that no other user can read. Restore the folder's usual mode.
    mode = S_IMODE(path.stat().st_mode)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    path.chmod(mode)


def _shard(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def packed_tensors(matrix: Matrix) -> dict[str, Tensor]:
    """The matrix's tensors by their name suffixes."""
    each = 32 // matrix.bits
    outputs, inputs = matrix.q.shape
    padded = torch.nn.functional.pad(matrix.q, (0, -inputs % each))
    filled = padded if matrix.bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
    return {
        "weight_packed": filled.contiguous().view(torch.int32),
        "weight_scale": matrix.scales.T,
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def quantization_config(bits: int, group: int | None, ignored: list[str], head: int | None = None) -> dict[str, Any]:
    """The quantization_config as compressed-tensors writes it.

    `ignored`: matrices that are not quantised. `head`: the bits of the output head, or of the embedding tied to it,
    with one scale for each output.
    """
    groups = {"group_0": _alike(["Linear"], bits, group)}
    if head is not None:
        groups["group_1"] = _alike(_HEADS, head, None)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _alike(targets: list[str], bits: int, group: int | None) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
