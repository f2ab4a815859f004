"""Quantises all matrices of a model, layer after layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, PreparedLinear
from engine.layers import Linear
from engine.models import load_model
from engine.models.decoder import Decoder
from engine.models.loader import Found, locate
from engine.quant.formats import Matrix
from engine.quant.make.folder import Writer, packed_tensors, quantization_config
from engine.quant.make.rounding import Grid, compensated, nearest
from engine.quant.make.walk import Walk
from engine.text.config import read_config

Method = Literal["gptq", "nearest"]
GROUPS = (128, 64, 32)
_HEAD = "lm_head.weight"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Recipe:
    bits: int
    """4 or 8."""
    method: Method = "gptq"
    """The rounding method. "gptq": least error for the calibration text's inputs. "nearest": each number by itself."""
    group: int | None = None
    """The number of inputs that share a scale, one of GROUPS. None: with 8 bits all inputs of an output, with 4 bits
    the largest group that divides all matrices."""
    head: int | None = None
    """The bits of the output head, 8, rounded to nearest with one scale for each output. A tied embedding is quantised
    with it. None: the head stays as it is."""


def plain(folder: Path, device: torch.device) -> Decoder:
    """Load the model in `folder` with plain torch kernels: in fp32 on a CPU, elsewhere in its own dtype. Raises
    ModelError."""

    def kernels(dtype: torch.dtype) -> Kernels:
        return Kernels(torch.float32 if device.type == "cpu" else dtype)

    model = load_model(folder, "auto", device, kernels)
    if not isinstance(model, Decoder):
        raise TypeError(f"{type(model).__name__} is no decoder")
    return model


@torch.inference_mode()
def quantise(
    folder: Path,
    out: Path,
    recipe: Recipe,
    windows: Sequence[Sequence[int]],
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> Recipe:
    """Quantise the model in `folder`, and write its weights and config.json into the folder `out`.

    Returns the recipe with its group. Raises ModelError if the model cannot be loaded, is quantised already, or has a
    matrix that the group does not divide.
    """
    settings = read_config(folder)
    if "quantization_config" in settings or "quantization_config" in settings.get("text_config", {}):
        raise ModelError(f"{folder} is quantised already; quantise the checkpoint that it was made of")
    model = plain(folder, device)
    stored = locate(folder)
    located = {ours: found for name, found in stored.items() if (ours := model.canonical(name)) is not None}
    layers: dict[str, list[tuple[str, Linear]]] = defaultdict(list)
    for prefix, linear in model.linears():
        if prefix:  # all but the head
            layers[prefix.rpartition(".layers.")[2].partition(".")[0]].append((prefix, linear))
    recipe = _with_group(recipe, [linear for linears in layers.values() for _, linear in linears])
    writer = Writer(out)
    walk = Walk(model, windows if recipe.method == "gptq" else [])
    done = set()
    for i, linears in enumerate(layers.values()):
        seen = _hessians(walk, linears) if recipe.method == "gptq" else {}
        for prefix, linear in linears:
            dense = []
            for part in linear.parts:
                found = located[f"{prefix}{part}.weight"]
                matrix = _round(found, recipe, seen.get(prefix + part), device)
                for end, tensor in packed_tensors(matrix).items():
                    writer.put(found.name.removesuffix("weight") + end, tensor)
                done.add(found.name)
                dense.append(matrix.dequantise().to(model.kernels.weight_dtype))
            if recipe.method == "gptq":
                linear.replace(partial(_of_weight, torch.cat(dense)))
        walk.step()
        say(f"layer {i + 1} of {len(layers)}")
    head = f"{model.head_name}.weight"
    if recipe.head is not None:
        found = located[head]
        matrix = nearest(_finite(found, device), Grid(recipe.head, None, _DTYPES[found.stored.dtype]))
        for end, tensor in packed_tensors(matrix).items():
            writer.put(found.name.removesuffix("weight") + end, tensor)
        # Tied checkpoints may also have the table under the head's name.
        done |= {found.name} | {name for name in stored if model.canonical(name) is None and name.endswith(_HEAD)}
        say("output head")
    rest = [found for found in stored.values() if found.name not in done]
    for found in rest:
        writer.put(found.name, _read(found, torch.device("cpu")))
    others = {found.name.removesuffix(".weight") for found in rest if _may_be_matrix(found)}
    ignored = others if recipe.head is not None else {"lm_head"} | others
    config = quantization_config(recipe.bits, recipe.group, sorted(ignored), recipe.head)
    writer.finish(settings | {"quantization_config": config})
    return recipe


def _with_group(recipe: Recipe, linears: Sequence[Linear]) -> Recipe:
    inputs = {linear.inputs for linear in linears}
    if recipe.group is not None:
        odd = sorted(width for width in inputs if width % recipe.group)
        if odd:
            raise ModelError(f"a group of {recipe.group} does not divide a matrix's {odd[0]} inputs")
        return recipe
    if recipe.bits == 8:
        return recipe
    fitting = [group for group in GROUPS if all(width % group == 0 for width in inputs)]
    if not fitting:
        raise ModelError(f"no group of {GROUPS} divides the inputs of all matrices: {sorted(inputs)}; use 8 bits")
    return replace(recipe, group=fitting[0])


def _hessians(walk: Walk, linears: Sequence[tuple[str, Linear]]) -> dict[str, Tensor]:
    """For each matrix of the next layer, by name, the sum of x x^T over its input rows. Raises ModelError if a sum is
    not finite."""
    sums = []
    for _, linear in linears:
        total = torch.zeros(linear.inputs, linear.inputs, device=linear.device)
        sums.append((linear, total, linear.replace(partial(_summing, total))))
    walk.look()
    for linear, _, run in sums:
        linear.replace(partial(_instead, run))
    for (prefix, linear), (_, total, _) in zip(linears, sums, strict=True):
        if not bool(torch.isfinite(total).all()):
            raise ModelError(
                f"what the calibration text multiplies with {prefix}{','.join(linear.parts)} is not finite: what the "
                "checkpoint has before it is not, or is too large"
            )
    return {
        prefix + part: total
        for (prefix, linear), (_, total, _) in zip(linears, sums, strict=True)
        for part in linear.parts
    }


def _summing(total: Tensor, run: PreparedLinear) -> PreparedLinear:
    def linear(x: Tensor) -> Tensor:
        wide = x.float()
        total.addmm_(wide.T, wide)
        return run(x)

    return linear


def _instead(new: PreparedLinear, run: PreparedLinear) -> PreparedLinear:
    return new


def _of_weight(weight: Tensor, run: PreparedLinear) -> PreparedLinear:
    """The product with another weight and the same bias, which `run` returns for a row of zeros."""
    bias = run(torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device))
    return lambda x: F.linear(x, weight) + bias


def _round(found: Found, recipe: Recipe, hessian: Tensor | None, device: torch.device) -> Matrix:
    weight = _finite(found, device)
    grid = Grid(recipe.bits, recipe.group, _DTYPES[found.stored.dtype])
    return nearest(weight, grid) if hessian is None else compensated(weight, hessian, grid)


def _finite(found: Found, device: torch.device) -> Tensor:
    """Read a tensor as fp32. Raises ModelError if it is not finite."""
    weight = _read(found, device).float()
    if not bool(torch.isfinite(weight).all()):
        raise ModelError(f"{found.path}: {found.name} has numbers that are not finite")
    return weight


def _read(found: Found, device: torch.device) -> Tensor:
    with safe_open(found.path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(found.name)
    return tensor.to(device)


def _may_be_matrix(found: Found) -> bool:
    """Whether a reader would take this tensor, which is not quantised, for a quantised matrix by its shape and name."""
    return found.name.endswith(".weight") and len(found.stored.shape) == 2 and "embed" not in found.name
