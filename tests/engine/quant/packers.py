"""Quantised folders by packers of their own: one number at a time, as the formats' descriptions read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.random_models import write_model

#: AutoAWQ's: of 8 neighbours, the one that each place of a word is for.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Numbers:
    """weight[n][k] = (q[n][k] - zeros[g][n]) * scales[g][n] with g = index[k]"""

    bits: int
    q: Tensor
    scales: Tensor
    zeros: Tensor
    index: Tensor

    def dense(self) -> Tensor:
        return (self.q.float() - self.zeros[self.index].T.float()) * self.scales[self.index].T.float()


def numbers(
    outputs: int, inputs: int, *, bits: int, group: int, seed: int, zeros: bool = True, shuffled: bool = False
) -> Numbers:
    given = torch.Generator().manual_seed(seed)
    groups = inputs // group
    index = torch.arange(inputs) // group
    if shuffled:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    most = 2**bits
    middle = torch.full((groups, outputs), most // 2)
    return Numbers(
        bits,
        torch.randint(0, most, (outputs, inputs), generator=given),
        (torch.rand(groups, outputs, generator=given) * 0.02 + 0.01).half(),
        torch.randint(0, most, (groups, outputs), generator=given) if zeros else middle,
        index,
    )


def words(rows: list[list[int]], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32: each row's numbers, 32 / bits in a word, the first in the lowest bits; or those that `order` names."""
    each = 32 // bits
    packed = []
    for row in rows:
        line = []
        for start in range(0, len(row), each):
            word = 0
            for place in range(each):
                at = start + (place if order is None else order[place])
                if at < len(row):
                    word |= row[at] << (bits * place)
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


def gptq(given: Numbers, *, version: int = 1) -> dict[str, Tensor]:
    stored = given.zeros if version == 2 else (given.zeros - 1) % 2**given.bits
    return {
        "qweight": words(given.q.tolist(), given.bits).T.contiguous(),
        "qzeros": words(stored.tolist(), given.bits),
        "scales": given.scales,
        "g_idx": given.index.int(),
    }


def awq(given: Numbers) -> dict[str, Tensor]:
    return {
        "qweight": words(given.q.T.tolist(), 4, AWQ_ORDER),
        "qzeros": words(given.zeros.tolist(), 4, AWQ_ORDER),
        "scales": given.scales,
    }


def packed(given: Numbers, *, zeros: bool) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words(given.q.tolist(), given.bits),
        "weight_scale": given.scales.T.contiguous(),
        "weight_shape": torch.tensor(given.q.shape),
    }
    if zeros:
        tensors["weight_zero_point"] = words(given.zeros.tolist(), given.bits).T.contiguous()
    return tensors


def pruned(values: Tensor) -> Tensor:
    """The values, of each four adjacent ones those two zero that are least."""
    kept = []
    for row in values.float().tolist():
        for start in range(0, len(row), 4):
            four = row[start : start + 4]
            largest = sorted(range(4), key=lambda at: (-abs(four[at]), at))[:2]
            kept.append([at in largest for at in range(4)])
    return torch.where(torch.tensor(kept).view(values.shape), values.float(), 0.0).to(values.dtype)


def bitmask(values: Tensor) -> dict[str, Tensor]:
    """A pruned matrix without its zeros: two of each four, zeros among them if need be."""
    outputs, inputs = values.shape
    compressed, mask = [], []
    for row in values.float().tolist():
        for start in range(0, inputs, 8):
            byte = 0
            for four in (range(start, start + 4), range(start + 4, start + 8)):
                places = sorted(sorted(four, key=lambda at: row[at] == 0)[:2])
                compressed += [row[at] for at in places]
                byte |= sum(1 << (at - start) for at in places)
            mask.append(byte)
    return {
        "compressed": torch.tensor(compressed).view(outputs, inputs // 2).to(values.dtype),
        "bitmask": torch.tensor(mask, dtype=torch.uint8).view(outputs, inputs // 8),
        "shape": torch.tensor([outputs, inputs]),
    }


def sparsity_config(form: str, structure: str = "2:4") -> Any:
    return {
        "format": form,
        "global_sparsity": 0.5,
        "ignore": ["lm_head"],
        "registry_requires_subclass": False,
        "sparsity_structure": structure,
        "targets": ["Linear"],
    }


def compressed_config(form: str, bits: int, group: int | None, *, symmetric: bool = True, kind: str = "int") -> Any:
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]
"""Of a matrix: its name and the weight that it had -> the tensors for it, the weight that they stand for."""


def write_quantised(folder: Path, config: dict[str, Any], pack: Pack, **changes: Any) -> Path:
    """A random model whose matrices are packed at `folder`/packed; the same with plain weights at the result,
    `folder`/plain."""
    for name in ("plain", "packed"):
        write_model(folder / name, tokenizer=False, **changes)
    held = load_file(folder / "plain" / "model.safetensors")
    tensors, dense = {}, {}
    for name, tensor in held.items():
        matrix = name.removesuffix(".weight")
        if not matrix.endswith(("_proj", ".w1", ".w2", ".w3")):
            tensors[name] = dense[name] = tensor
            continue
        parts, dense[name] = pack(matrix, tensor)
        tensors |= {f"{matrix}.{end}": part for end, part in parts.items()}
    save_file(tensors, folder / "packed" / "model.safetensors")
    save_file(dense, folder / "plain" / "model.safetensors")
    settings = folder / "packed" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"quantization_config": config}))
    return folder / "plain"
