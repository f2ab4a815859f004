"""Quantises all matrices of a model, layer after layer, and those of each expert on the rows that it is to see."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_IMODE
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ModelError
from engine.kernels import Kernels, PreparedLinear, select
from engine.kernels.native import load_library
from engine.layers import Experts, Linear
from engine.models import load_encoder, load_model
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.models.encoders import FUSED
from engine.models.loader import opened_file, read, separate, split_fused
from engine.quant.formats import Matrix
from engine.quant.make.rounding import Grid, compensated, input_hessian, nearest
from engine.quant.make.walk import Walk
from engine.text import gguf
from engine.text.config import read_config
from engine.text.tensors import INDEX, SINGLE, LocatedTensor, locate

#: The most bytes of tensors in one file.
_FULL = 4 << 30
#: The targets of the head's group. With a tied head, only the embedding exists.
_HEADS = ["re:.*lm_head$", "re:.*embed_tokens$"]
#: Those of the group of the matrices that lead back from the feed-forward blocks.
_DOWNS = ["re:.*down_proj$", "re:.*w2$"]


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


def quantization_config(recipe: Recipe, ignored: list[str]) -> dict[str, Any]:
    """The quantization_config as compressed-tensors writes it. `ignored`: matrices that are not quantised."""
    groups = {"group_0": _alike(["Linear"], recipe.bits, recipe.group)}
    if recipe.head is not None:
        groups["group_1"] = _alike(_HEADS, recipe.head, None)
    if recipe.down is not None:
        groups["group_2"] = _alike(_DOWNS, recipe.down, recipe.group)
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


Method = Literal["gptq", "nearest"]
GROUPS = (128, 64, 32)
#: The groups of encoders: their vectors lose twice as much by one scale for all inputs.
ENCODER_GROUPS = (64, 32)
#: Into how many groups an output's weights are cut at least, if they are wide enough: narrow models lose most.
_GROUPS_OF_A_ROW = 16
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
    the largest group that divides all matrices and cuts each output's weights into 16 groups."""
    head: int | None = None
    """The bits of the output head, 8, rounded to nearest with one scale for each output. A tied embedding is quantised
    with it. None: the head stays as it is."""
    down: int | None = None
    """The bits of the matrices that lead back from the feed-forward blocks, 8, with `group`; None: `bits`. Of all
    matrices these lose most by 4 bits."""

    def bits_of(self, name: str) -> int:
        """The bits of the matrix `name` of a layer, as the engine names it."""
        return self.down if self.down is not None and name.endswith("down_proj") else self.bits


def decoder(folder: Path, device: torch.device) -> Decoder:
    """Load the model in `folder`, in its own dtype: on a CPU with native kernels, or without them in fp32 with plain
    torch kernels; elsewhere with plain torch kernels. Raises ModelError."""

    def kernels(dtype: torch.dtype) -> Kernels:
        if device.type == "cpu" and load_library() is not None:
            return select(device, dtype, "native")
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
    model = decoder(folder, device)
    layers = _layers(model)
    recipe = _with_group(recipe, [linear for linears in layers for _, linear in linears])
    making = _Making(folder, model, recipe, Writer(out))
    walk = Walk(model, windows) if recipe.method == "gptq" else None
    for i, linears in enumerate(layers):
        making.round_layer(i, linears, walk)
        say(f"layer {i + 1} of {len(layers)}")
    if recipe.head is not None:
        making.round_head(model.head_name, recipe.head)
        say("output head")
    making.finish(settings)
    return recipe


def _layers(model: Decoder) -> list[list[tuple[str, Linear]]]:
    """Each layer's products, in the order in which it calls them. The head and routers are not among them."""
    layers: dict[str, list[tuple[str, Linear]]] = defaultdict(list)
    for prefix, linear in model.linears():
        if not linear.makes_logits:
            layers[prefix.rpartition(".layers.")[2].partition(".")[0]].append((prefix, linear))
    return list(layers.values())


@torch.inference_mode()
def quantise_encoder(folder: Path, out: Path, recipe: Recipe, device: torch.device) -> Recipe:
    """Quantise the encoder in `folder` as `quantise` does a decoder: to nearest, and not its head. Of its recipe the
    group counts; None is the first of ENCODER_GROUPS that divides all matrices. Raises ModelError as `quantise`."""
    settings = read_config(folder)
    if "quantization_config" in settings:
        raise ModelError(f"{folder} is quantised already; quantise the checkpoint that it was made of")
    model = encoder(folder, device)
    linears = model.linears()
    widths = {linear.inputs for _, linear in linears}
    fitting = [group for group in ENCODER_GROUPS if all(width % group == 0 for width in widths)]
    if recipe.group is None and fitting:
        recipe = replace(recipe, group=fitting[0])
    recipe = _with_group(recipe, [linear for _, linear in linears])
    making = _Making(folder, model, recipe, Writer(out), split_fused(locate(folder), FUSED))
    for prefix, linear in linears:
        making.round(prefix, linear)
    making.finish(settings)
    return recipe


def encoder(folder: Path, device: torch.device) -> Encoder:
    """Load the encoder in `folder`, in its own dtype. Raises ModelError."""
    return load_encoder(folder, "auto", device)


class _Making:
    """A checkpoint that is being made of a model."""

    def __init__(
        self,
        folder: Path,
        model: Decoder | Encoder,
        recipe: Recipe,
        writer: Writer,
        stored: Mapping[str, LocatedTensor] | None = None,
    ) -> None:
        """`stored`: the checkpoint's tensors; None: those in `folder`, separated as a decoder's."""
        self._model, self._recipe, self._writer = model, recipe, writer
        self._stored = separate(locate(folder)) if stored is None else stored
        self._names = {ours: name for name in self._stored if (ours := model.canonical(name)) is not None}
        kernels = model.kernels
        self._sums = kernels if kernels.compute_dtype == torch.float32 else Kernels(torch.float32)
        self._done: set[str] = set()

    def round_layer(self, i: int, linears: Sequence[tuple[str, Linear]], walk: Walk | None) -> None:
        """Round the matrices of layer `i`: to nearest, or for the inputs that the step of `walk` brings."""
        for prefix, linear in linears:
            if walk is None:
                self.round(prefix, linear)
            else:
                self._round_when_called(prefix, linear)
        if walk is not None:
            block = walk.model.feed_forward(i)
            if isinstance(block, Experts):
                _run_each_when_called(block, self._model.kernels)
            walk.step()

    def _round_when_called(self, prefix: str, linear: Linear) -> None:
        """When `linear` is called, round its matrices for its inputs. From then on its product is that of these."""

        def make(run: PreparedLinear) -> PreparedLinear:
            def first(x: Tensor) -> Tensor:
                product = self._for_inputs(prefix, linear, x).prepare(self._model.kernels, _bias(run, x))
                linear.replace(lambda _: product)
                return product(x)

            return first

        linear.replace(make)

    def _for_inputs(self, prefix: str, linear: Linear, x: Tensor) -> Matrix:
        total = input_hessian(x, self._sums)
        if not bool(torch.isfinite(total).all()):
            raise ModelError(
                f"the inputs of {prefix}{','.join(linear.parts)} become NaN or infinite on the calibration text: "
                "weights before it are damaged, or too large"
            )
        return self.round(prefix, linear, total)

    def round(self, prefix: str, linear: Linear, total: Tensor | None = None) -> Matrix:
        """Round the matrices of `linear`, to nearest without a Hessian, and write them. Returns them as one."""
        names = [self._names[f"{prefix}{part}.weight"] for part in linear.parts]
        weight = torch.cat([self._finite(name) for name in names])
        bits = self._recipe.bits_of(f"{prefix}{next(iter(linear.parts))}")
        grid = Grid(bits, self._recipe.group, self._dtype(names[0]))
        matrix = nearest(weight, grid) if total is None else compensated(weight, total, grid)
        outputs = list(linear.parts.values())
        for name, q, scales in zip(
            names, torch.split(matrix.q, outputs), torch.split(matrix.scales, outputs, 1), strict=True
        ):
            self._put(name, replace(matrix, q=q, scales=scales))
        return matrix

    def round_head(self, head: str, bits: int) -> None:
        """Round the output head, which the engine names so."""
        name = self._names[f"{head}.weight"]
        self._put(name, nearest(self._finite(name), Grid(bits, None, self._dtype(name))))
        # Tied checkpoints may also have the table under the head's name.
        self._done |= {name for name in self._stored if self._model.canonical(name) is None and name.endswith(_HEAD)}

    def _put(self, name: str, matrix: Matrix) -> None:
        for end, tensor in packed_tensors(matrix).items():
            self._writer.put(name.removesuffix("weight") + end, tensor)
        self._done.add(name)

    def _dtype(self, name: str) -> torch.dtype:
        # What GGUF has quantised is computed in the model's dtype.
        return _DTYPES.get(self._stored[name].stored.dtype, self._model.dtype)

    def _finite(self, name: str) -> Tensor:
        """Read a tensor as fp32. Raises ModelError if it is not finite."""
        weight = _read(self._stored[name], self._model.device).float()
        if not bool(torch.isfinite(weight).all()):
            raise ModelError(f"{self._stored[name].path}: {name} has numbers that are not finite")
        return weight

    def finish(self, settings: dict[str, Any]) -> None:
        """Write what is not quantised, and config.json: `settings` with the description of what is."""
        unchanged = {name: located for name, located in self._stored.items() if name not in self._done}
        for name, located in unchanged.items():
            self._writer.put(name, _read(located, torch.device("cpu")).to(self._dtype(name)))
        recipe = self._recipe
        others = {name.removesuffix(".weight") for name, located in unchanged.items() if _may_be_matrix(name, located)}
        ignored = others if recipe.head is not None else {"lm_head"} | others
        config = quantization_config(recipe, sorted(ignored))
        kept = {name: value for name, value in settings.items() if name != gguf.TYPES}
        self._writer.finish(kept | {"quantization_config": config})


def _bias(run: PreparedLinear, x: Tensor) -> Tensor:
    """The bias of a product, which is what it makes of a row of zeros."""
    return run(torch.zeros_like(x[:1]))[0]


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
    narrow = [group for group in fitting if group * _GROUPS_OF_A_ROW <= min(inputs)]
    return replace(recipe, group=(narrow or fitting[-1:])[0])


def _run_each_when_called(experts: Experts, kernels: Kernels) -> None:
    """When `experts` is called, first run each expert by itself, on `rows_of` it. So each of its products is called
    once, and what they are replaced by then runs on the routed rows."""

    def make(run: PreparedLinear) -> PreparedLinear:
        def first(x: Tensor) -> Tensor:
            logits = run(x)
            chosen, _ = kernels.route(logits, experts.shape.chosen, experts.shape.normed)
            least = max(experts.shape.width, x.shape[1])
            for i, expert in enumerate(experts.experts):
                expert(x[rows_of(i, logits, chosen, least)])
            experts.router.replace(lambda _: run)
            experts.prepare()
            return logits

        return first

    experts.router.replace(make)


def rows_of(expert: int, logits: Tensor, chosen: Tensor, least: int) -> Tensor:
    """The indexes of an expert's calibration rows: those that are routed to it. If they are fewer than `least`, the
    rows for which it is likeliest are added: from fewer rows than a matrix has inputs, GPTQ learns too little.

    `logits`: the router's, [rows, experts]. `chosen`: int64 [rows, chosen].
    """
    routed = (chosen == expert).any(1)
    likely = logits.float().softmax(-1)[:, expert]
    order = torch.where(routed, likely + 1, likely).argsort(descending=True, stable=True)
    return order[: max(int(routed.sum()), least)].sort().values


def _read(located: LocatedTensor, device: torch.device) -> Tensor:
    with opened_file(located) as file:
        return read(file, located).to(device)


def _may_be_matrix(name: str, located: LocatedTensor) -> bool:
    """Whether a reader would take this tensor, which is not quantised, for a quantised matrix by its shape and name."""
    return name.endswith(".weight") and len(located.stored.shape) == 2 and "embed" not in name
