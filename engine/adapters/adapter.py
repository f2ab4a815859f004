"""Loads an adapter for a model: checks it against the model's matrices and prepares its products."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import AdapterRoomError, ErrorText, ModelError
from engine.kernels import LowRankChange, PreparedLinear
from engine.layers import Linear
from engine.models import Model
from engine.models.loader import opened_file, read
from engine.models.shares import narrowed
from engine.text.adapter import MAX_RANK, AdapterFiles, LowRankTensors, StackedTensors, read_adapter
from engine.text.tensors import LocatedTensor

#: The module of the output head in checkpoints.
_HEAD: Final = "lm_head"


@dataclass(frozen=True, slots=True)
class LowRankEmbedding:
    """The change of an embedding's rows: scale * B A[:, token]."""

    columns: Tensor
    """A, transposed: [vocabulary, rank]."""
    up: PreparedLinear

    def rows(self, tokens: Tensor) -> Tensor:
        return self.up(F.embedding(tokens, self.columns))


@dataclass(frozen=True, slots=True)
class _Stack:
    """The change of one product of all experts of a layer."""

    linears: tuple[Linear, ...]
    """That product of each expert."""
    tensors: StackedTensors
    rank: int
    scale: float
    outputs: tuple[range, ...]
    """The rows of B that are this rank's."""
    inputs: range
    """The columns of A that are this rank's."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """A loaded adapter. It never changes, so any number of requests and threads may share it."""

    version: str
    """See AdapterFiles."""
    rank: int
    """The largest rank of its matrices."""
    products: Mapping[Linear, LowRankChange] = field(repr=False)
    embedding: Tensor | LowRankEmbedding | None = field(default=None, repr=False)
    """The embedding's own table, [vocabulary, width], or the change of the model's. None: the model's."""
    head: PreparedLinear | None = field(default=None, repr=False)
    """Its own product that makes logits. None: the model's."""
    head_change: LowRankChange | None = field(default=None, repr=False)
    """The change of the model's product that makes logits."""
    nbytes: int = 0
    """The bytes that its matrices take."""
    changes_experts: bool = False
    """Whether it changes products of experts."""

    def changes(self) -> dict[PreparedLinear, LowRankChange]:
        """See PreparedAdapter."""
        return {linear.prepared: change for linear, change in self.products.items()}


def load_adapter(folder: str | Path, model: Model, max_bytes: int | None = None) -> Adapter:
    """Load the adapter in `folder` for `model`. Any thread may call it while the model runs.

    Raises ModelError naming the file, setting or tensor at fault if the folder is no adapter that is supported, or does
    not fit the model, and AdapterRoomError if it takes more than `max_bytes`: both before any value is read. Raises
    ModelError, too, for values that are not finite.
    """
    files = read_adapter(folder)
    return _Loading(files, model).adapter(max_bytes)


class _Loading:
    def __init__(self, files: AdapterFiles, model: Model) -> None:
        self._files, self._model = files, model
        self._kernels, self._device = model.kernels, model.device
        self._parts = {
            prefix + part: (linear, part) for prefix, linear in model.linears() for part in linear.parts if prefix
        }
        self._mixtures: dict[str, list[Linear]] = defaultdict(list)
        for prefix, linear in model.linears():
            mixture, experts, _ = prefix.partition(".experts.")
            if experts:
                self._mixtures[mixture + ".experts"].append(linear)
        self._table_name, self._table = model.embedding()
        self._open: dict[Path, Any] = {}
        self._nbytes = 0

    def adapter(self, max_bytes: int | None) -> Adapter:
        files = self._files
        divided = self._kernels.share is not None or self._model.staged
        if divided and (_HEAD in files.matrices or files.embeddings or files.whole):
            raise ModelError(
                ErrorText.of(
                    "{}: an adapter that changes the embedding or the output head does not go with {tensor_parallel} "
                    "or {pipeline_parallel}",
                    files.folder,
                )
            )
        products: dict[Linear, dict[str, LowRankTensors]] = defaultdict(dict)
        elsewhere: list[LowRankTensors | StackedTensors] = []
        head: LowRankTensors | LocatedTensor | None = None
        embedding: LowRankTensors | LocatedTensor | None = None
        for module, pair in files.matrices.items():
            name = self._name_in_model(module)
            if name == _HEAD:
                self._fits(pair, *self._head_shape)
                head = pair
                continue
            if name is None and self._model.elsewhere(module):
                elsewhere.append(pair)
                continue
            linear, part = self._linear(module, name)
            products[linear][part] = self._own_part(pair, module, linear, part)
        for module, pair in files.embeddings.items():
            self._check_embedding(module)
            rows, width = self._table.shape
            self._fits(pair, width, rows)
            embedding = pair
        for module, whole in files.whole.items():
            if self._name_in_model(module) == _HEAD:
                head = self._replaces(whole, head, self._head_shape)
            else:
                self._check_embedding(module)
                embedding = self._replaces(whole, embedding, self._table.shape)
        stacks = []
        for module, pairs in files.stacks.items():
            if self._model.elsewhere(module):
                elsewhere += pairs
            else:
                stacks += [self._stack(module, pair) for pair in pairs]
        self._check_changed_once([*products, *(linear for stack in stacks for linear in stack.linears)])
        self._check_size(products, [*elsewhere, *(stack.tensors for stack in stacks)], head, embedding, max_bytes)
        with ExitStack() as opened:
            tensors = [*files.whole.values(), *(t for pair in _pairs(files) for t in (pair.a, pair.b))]
            tensors += [t for stack in stacks for t in (stack.tensors.a, stack.tensors.b)]
            for tensor in tensors:
                if tensor.path not in self._open:
                    self._open[tensor.path] = opened.enter_context(opened_file(tensor))
            changes = {linear: self._low_rank(linear.parts, pairs) for linear, pairs in products.items()}
            for stack in stacks:
                changes |= self._of_experts(stack)
            self._kernels.bring_together([*changes.values()])
            # Of any stage: whether a step is recorded is decided by the first one.
            changes_experts = bool(files.stacks) or any(".experts." in module for module in files.matrices)
            return Adapter(
                files.version,
                max(files.rank, *(stack.rank for stack in stacks), 0),
                changes,
                self._made_embedding(embedding),
                self._prepared(self._read(head).clone()) if isinstance(head, LocatedTensor) else None,
                self._head_change(head) if isinstance(head, LowRankTensors) else None,
                self._nbytes,
                changes_experts,
            )

    # ---- what fits what

    def _name_in_model(self, module: str) -> str | None:
        """The model's name of a module of the base's checkpoint; None for a module that the model leaves out."""
        if module == _HEAD:
            return _HEAD  # a tied model's checkpoint need not have it
        name = self._model.canonical(f"{module}.weight")
        return None if name is None else name.removesuffix(".weight")

    def _linear(self, module: str, name: str | None) -> tuple[Linear, str]:
        entry = None if name is None else self._parts.get(name)
        if entry is None or name is None:
            base = self._files.base
            raise ModelError(
                f"{self._files.folder}: the model has no matrix {module}, which the adapter changes"
                + (f"; the adapter was made for {base}" if base else "")
            )
        return entry

    @property
    def _head_shape(self) -> tuple[int, int]:
        """The outputs and inputs of the output head."""
        return self._table.shape

    def _check_embedding(self, module: str) -> None:
        if self._name_in_model(module) != self._table_name:
            raise ModelError(
                f"{self._files.folder}: {module} is saved whole; of whole matrices only the embedding and the output "
                f"head are supported (modules_to_save)"
            )

    def _own_part(self, pair: LowRankTensors, module: str, linear: Linear, part: str) -> LowRankTensors:
        """The matrices' part that goes with this rank's part of the model's."""
        cut = self._model.cut(str(self._name_in_model(module)))
        if cut is None:
            self._fits(pair, linear.parts[part], linear.inputs)
            return pair
        self._fits(pair, cut.outputs, cut.inputs)
        return replace(pair, a=narrowed(pair.a, 1, cut.own_inputs), b=narrowed(pair.b, 0, cut.own_outputs))

    def _stack(self, module: str, pair: StackedTensors) -> _Stack:
        """The product that a change of all of a layer's experts is of. Their shapes tell it: PEFT's names do not."""
        name = self._name_in_model(module)
        linears = self._mixtures.get(name or "")
        if name is None or linears is None:
            raise ModelError(f"{self._files.folder}: the model has no experts {module}, which the adapter changes")
        of_product = {"gate_up_proj": tuple(linears[::2]), "down_proj": tuple(linears[1::2])}
        shapes = {}
        for product, experts in of_product.items():
            cuts = [self._model.cut(f"{name}.0.{part}") for part in experts[0].parts]
            if cuts[0] is None:
                every, inputs, own_inputs = sum(experts[0].parts.values()), experts[0].inputs, range(experts[0].inputs)
                outputs: tuple[range, ...] = (range(every),)
            else:
                every, inputs, own_inputs, outputs = 0, cuts[0].inputs, cuts[0].own_inputs, ()
                for cut in cuts:
                    assert cut is not None
                    outputs += (range(every + cut.own_outputs.start, every + cut.own_outputs.stop),)
                    every += cut.outputs
            shapes[product] = f"{product} [{every}, {inputs}]"
            if (pair.b.stored.shape[0], pair.a.stored.shape[1]) == (every, inputs):
                count, rows = len(experts), pair.a.stored.shape[0]
                if rows % count or not 1 <= rows // count <= MAX_RANK:
                    raise ModelError(
                        f"{pair.a.path}: {pair.a.name} has {rows} rows; {count} experts of a rank from 1 to {MAX_RANK} "
                        f"each are expected"
                    )
                scale = self._files.scale(f"{module}.{product}", rows // count)
                return _Stack(experts, pair, rows // count, scale, outputs, own_inputs)
        raise ModelError(
            f"{pair.a.path}: {pair.a.name} has {pair.a.stored.shape[1]} inputs and {pair.b.name} has "
            f"{pair.b.stored.shape[0]} outputs; the model's experts have {' and '.join(shapes.values())}"
        )

    def _check_changed_once(self, linears: Sequence[Linear]) -> None:
        if len(set(linears)) < len(linears):
            raise ModelError(f"{self._files.folder}: the adapter changes a product of experts more than once")

    def _fits(self, pair: LowRankTensors, outputs: int, inputs: int) -> None:
        self._check_shape(pair.a, (pair.rank, inputs))
        self._check_shape(pair.b, (outputs, pair.rank))

    def _replaces(
        self, whole: LocatedTensor, low_rank: LowRankTensors | LocatedTensor | None, shape: tuple[int, int]
    ) -> LocatedTensor:
        if low_rank is not None:
            raise ModelError(f"{self._files.folder}: {whole.name} is given whole and as a change of low rank")
        self._check_shape(whole, shape)
        return whole

    def _check_shape(self, tensor: LocatedTensor, shape: tuple[int, int]) -> None:
        if tensor.stored.shape != shape:
            base = self._files.base
            raise ModelError(
                f"{tensor.path}: {tensor.name} has shape {list(tensor.stored.shape)}; the model asks for {list(shape)}"
                + (f" (the adapter was made for {base})" if base else "")
            )

    def _check_size(
        self,
        products: Mapping[Linear, Mapping[str, LowRankTensors]],
        more: Iterable[LowRankTensors | StackedTensors],
        head: LowRankTensors | LocatedTensor | None,
        embedding: LowRankTensors | LocatedTensor | None,
        max_bytes: int | None,
    ) -> None:
        """`more`: stacks, and matrices of other stages, which count whole: a group's adapters have one limit."""
        pairs = [pair for parts in products.values() for pair in parts.values()]
        width = self._kernels.weight_dtype.itemsize
        self._nbytes = width * sum(_numbers(entry) for entry in (*pairs, *more, head, embedding) if entry is not None)
        if max_bytes is not None and self._nbytes > max_bytes:
            raise AdapterRoomError(
                f"{self._files.folder}: the adapter takes {self._nbytes} bytes; there is room for {max_bytes}",
                self._nbytes,
            )

    # ---- values

    def _low_rank(self, parts: Mapping[str, int], pairs: Mapping[str, LowRankTensors]) -> LowRankChange:
        """`parts`: the outputs of each part of the product, in order. `pairs`: of the parts that are adapted."""
        downs, ups = [], []
        output = rank = 0
        for part, outputs in parts.items():
            if (pair := pairs.get(part)) is not None:
                downs.append(self._read(pair.a))
                up = self._weight(self._scaled(pair.b, pair.scale))
                ups.append((slice(output, output + outputs), slice(rank, rank + pair.rank), up))
                rank += pair.rank
            output += outputs
        return self._kernels.prepare_low_rank(self._weight(torch.cat(downs)), ups)

    def _of_experts(self, stack: _Stack) -> dict[Linear, LowRankChange]:
        inputs, count = stack.inputs, len(stack.linears)
        a = self._read(stack.tensors.a).clone().view(count, stack.rank, -1)[..., inputs.start : inputs.stop]
        b = self._scaled(stack.tensors.b, stack.scale).view(-1, stack.rank, count)
        b = torch.cat([b[rows.start : rows.stop] for rows in stack.outputs])
        ups = (slice(0, len(b)), slice(0, stack.rank))
        return {
            linear: self._kernels.prepare_low_rank(self._weight(a[i]), [(*ups, self._weight(b[..., i]))])
            for i, linear in enumerate(stack.linears)
        }

    def _made_embedding(self, entry: LowRankTensors | LocatedTensor | None) -> Tensor | LowRankEmbedding | None:
        if entry is None:
            return None
        if isinstance(entry, LocatedTensor):
            return self._read(entry).to(self._device, self._model.dtype, copy=True)
        columns = self._read(entry.a).T.to(self._device, self._kernels.weight_dtype, copy=True).contiguous()
        return LowRankEmbedding(
            columns.to(self._kernels.compute_dtype), self._prepared(self._scaled(entry.b, entry.scale))
        )

    def _head_change(self, pair: LowRankTensors) -> LowRankChange:
        return self._low_rank({_HEAD: self._head_shape[0]}, {_HEAD: pair})

    def _scaled(self, tensor: LocatedTensor, scale: float) -> Tensor:
        """A copy of a tensor's values times a factor, in fp32. Raises as `_read`."""
        return self._read(tensor, scale).float() * scale

    def _read(self, tensor: LocatedTensor, scale: float = 1.0) -> Tensor:
        """A tensor's values as they are stored, on the host, maybe in the file's own memory: to be copied, because the
        file may change, or shrink, once the adapter is loaded. Raises ModelError if they are not finite, or would not
        be in the base's data type, times `scale`."""
        values = read(self._open[tensor.path], tensor)
        lowest, highest = map(float, values.aminmax())  # NaN if one is
        if not math.isfinite(lowest) or not math.isfinite(highest):
            raise ModelError(f"{tensor.path}: {tensor.name} has values that are not finite (NaN or infinity)")
        dtype = self._kernels.weight_dtype
        largest = max(-lowest, highest)
        if largest * abs(scale) > torch.finfo(dtype).max:
            times = "" if scale == 1 else f", {scale:g} times as large when applied"
            raise ModelError(
                f"{tensor.path}: {tensor.name} has values up to {largest:g}{times}; the base's data type, "
                f"{str(dtype).removeprefix('torch.')}, holds none so large"
            )
        return values

    def _prepared(self, weight: Tensor) -> PreparedLinear:
        return self._kernels.prepare_adapter(self._weight(weight))

    def _weight(self, values: Tensor) -> Tensor:
        return values.to(self._device, self._kernels.weight_dtype).contiguous()


def _pairs(files: AdapterFiles) -> Iterable[LowRankTensors]:
    return (*files.matrices.values(), *files.embeddings.values())


def _numbers(entry: LowRankTensors | StackedTensors | LocatedTensor) -> int:
    tensors = (entry,) if isinstance(entry, LocatedTensor) else (entry.a, entry.b)
    return sum(rows * columns for rows, columns in (tensor.stored.shape for tensor in tensors))
