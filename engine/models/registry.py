"""Loads a model, or its shape alone, of the family that config.json names."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.declared import shown
from engine.errors import ErrorText, ModelError
from engine.kernels import Kernels, RaggedBatch, select
from engine.kernels.collectives import Collectives
from engine.kernels.native.exchange import WHOLE, Exchange, Share
from engine.kernels.reference import Reference
from engine.kv import KvGroup
from engine.layers import AdaptedRows, Embedding, Linear, StepAdapters
from engine.memory import check_weights
from engine.models.decoder import Decoder
from engine.models.encoder import Encoder
from engine.models.encoders import ENCODERS, FUSED
from engine.models.families import FAMILIES
from engine.models.loader import Fill, Progress, match, separate, split_fused, weights_of
from engine.models.settings import DecoderSettings
from engine.models.shares import Cut, check_ranks, cut_of, shares_of
from engine.quant.formats import NarrowedStored, Scheme, Stored, read_scheme, stored_as
from engine.quant.formats.scheme import SECTIONS
from engine.text.config import Config, architectures, read_config
from engine.text.gguf import TYPES, in_memory
from engine.text.tensors import LocatedTensor, StoredTensor, locate

logger = logging.getLogger(__name__)

#: Settings that count parts of a model, each with tensors of its own.
_PARTS = {
    "num_hidden_layers": "layers",
    "n_layers": "layers",
    "n_layer": "layers",
    "num_experts": "experts",
    "num_local_experts": "experts",
}
#: The most experts of all layers that are made to know a model's size: three times the most known.
_MOST_EXPERTS = 1 << 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: A rank's part of the matrix of a name. None: the model has all of it.
Cuts = Callable[[str], Cut | None]


def uncut(name: str) -> Cut | None:
    """The Cuts of a whole model."""
    return None


class Model(Protocol):
    """The interface of a model to the runners."""

    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    context_length: int
    kv_groups: tuple[KvGroup, ...]
    """The layers, grouped by how far back they see. Each group has its own KV blocks. A stage's may have no layer."""
    staged: bool
    """Whether other processes have other layers of it."""
    rope_switch: int | None
    """The tokens of the longest sequence that uses the short set of rope frequencies; see layers/attention.py."""

    def linears(self) -> list[tuple[str, Linear]]:
        """The matrices that may be quantised, each with the prefix of its tensors' names."""

    def embedding(self) -> tuple[str, Embedding]:
        """The embedding, which may be quantised too, with the prefix of its tensors' names."""

    def weights(self) -> dict[str, Tensor]:
        """The tensors to fill from the checkpoint, by name."""

    def canonical(self, name: str) -> str | None:
        """The name in `weights` of a checkpoint's tensor. None for a tensor to skip."""

    def cut(self, name: str) -> Cut | None:
        """The part of the matrix `name` that this rank has. None if it has all of it."""

    def elsewhere(self, name: str) -> bool:
        """Whether another stage has the part of the model to which the matrix or tensor `name` belongs."""

    def pack(self, fill: Fill = lambda places: None) -> None:
        """Prepare the weights for the kernels, once. `fill` gets the tensors of `weights` part after part, each before
        that part is prepared: so only one part at a time takes memory in both forms. Without it, all are filled."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        long: Tensor | None,
        attention: Sequence[RaggedBatch],
        caches: Sequence[Tensor],
        output_rows: Tensor,
        adapters: StepAdapters | None = None,
        entering: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states [output_rows, width], normed, of the token rows whose indexes are in `output_rows`.

        `tokens`, `positions`: int64 [tokens]. `long`: bool [tokens], whether the token's sequence is beyond
        `rope_switch`; None if the model has none. `attention` and `caches` have one entry for each of `kv_groups`. A
        cache is [layers of the group, 2, blocks, block_size, kv_heads, head_dim]. `adapters`: those of the rows; None
        if no row has one. `entering`: [tokens, width], what the stage before this one returned; None for the first
        stage. A stage before the last one returns what enters the next, of all tokens.
        """

    def logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """The logits [rows, vocabulary] of hidden states from `forward`. Separate, so that a long prompt's come in
        parts. `adapters`: those of these rows."""

    def peaks(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """The index of each row's largest logit, and whether all logits are finite (see Kernels.peaks). None if the
        kernels cannot find them without storing the logits."""


def load_model(
    folder: str | Path,
    dtype: str,
    device: torch.device,
    kernels: Callable[[torch.dtype], Kernels] | str = "auto",
    quantization: str = "none",
    deterministic: bool = False,
    kv_cache_dtype: str = "auto",
    progress: Progress = lambda done, total: None,
    *,
    headless: bool = False,
    exchange: Exchange | Collectives | None = None,
    stage: Share = WHOLE,
    processes: int = 1,
) -> Decoder:
    """Load the checkpoint in `folder`. `dtype` may be "auto": the one that config.json names. `headless`: also a
    checkpoint of the model below the head that makes logits, where the embedding is tied to that: its tensors' names
    and its architecture's lack a part.

    `kernels`: a function that makes a kernel set, or a name for `engine.kernels.select`, which chooses a set by
    `quantization`, `deterministic` and `kv_cache_dtype`. `progress` is called as weights are read. Raises ModelError
    about the folder, and EngineError if the set does not support `device`.

    `exchange`: this rank's end, to load its share of the model alone. `stage`: the part of the layers to load.
    `processes`: that load as much on this machine at the same time.
    """
    path = Path(folder)
    make, config, weight_dtype = _read(path, dtype, headless=headless)
    if not headless and make.args[0].read(config).bidirectional:
        raise config.wrong(
            "use_bidirectional_attention", "is not supported in a model that generates: tokens see those after them"
        )
    scheme = _scheme(path, config, quantization, device)
    kernel_set = (
        select(device, weight_dtype, kernels, quantization, deterministic, kv_cache_dtype)
        if isinstance(kernels, str)
        else kernels(weight_dtype)
    )
    located = separate(locate(path))
    if headless and not any(name.startswith("model.") for name in located):
        located = {f"model.{name}": tensor for name, tensor in located.items()}
    _check_parts(path, config, located)
    make_share = partial(make, kernel_set, weight_dtype, stage=stage)
    cuts: Cuts = uncut
    if exchange is not None:
        check_ranks_of(path, exchange.share.ranks)
        settings: DecoderSettings = make.args[0].read(config)
        located, cuts = _divided(path, make_share(torch.device("meta")), settings, scheme, located, exchange.share)
        if isinstance(exchange, Exchange):
            kernel_set.exchange = exchange
        else:
            kernel_set.collectives = exchange
    return _filled(path, located, make_share, config, scheme, weight_dtype, device, progress, processes, cuts)


def _divided(
    path: Path,
    whole: Decoder,
    settings: DecoderSettings,
    scheme: Scheme | None,
    located: Mapping[str, LocatedTensor],
    share: Share,
) -> tuple[dict[str, LocatedTensor], Cuts]:
    """A rank's parts of the checkpoint's tensors and of the matrices. `whole`: the model without weights, whose
    matrices are prepared for no kernels. Raises ModelError."""
    kept = None if scheme is None else adopt(path, whole, scheme, located)
    matched = match(path, located, whole.weights(), whole.canonical if kept is None else kept.canonical)
    parts = shares_of(matched, settings, share, () if kept is None else kept.exact)
    return parts, partial(cut_of, c=settings, share=share)


def check_ranks_of(folder: Path, ranks: int, stages: int = 1) -> None:
    """Raise ModelError if `stages` stages of `ranks` processes each cannot compute the model in `folder` together."""
    make, config, _ = _read(folder, "auto")
    check_ranks(folder, make.args[0].read(config), ranks, stages)


def load_encoder(
    folder: str | Path,
    dtype: str,
    device: torch.device,
    kernels: Callable[[torch.dtype], Kernels] | str = "auto",
    deterministic: bool = False,
    progress: Progress = lambda done, total: None,
) -> Encoder:
    """Load the encoder in `folder`, as `load_model` loads a model that generates. Raises ModelError and EngineError."""
    path = Path(folder)
    settings = read_config(path)
    names = architectures(settings)
    family = next((ENCODERS[name] for name in names if name in ENCODERS), None)
    if family is None:
        raise ModelError(
            f"{path}: config.json names the architectures {shown(names)}; supported encoders are "
            f"{', '.join(sorted(ENCODERS))}"
        )
    config = Config(settings)
    weight_dtype = _dtype(path, config, dtype)
    scheme = _scheme(path, config, "none", device)
    kernel_set = (
        select(device, weight_dtype, kernels, deterministic=deterministic)
        if isinstance(kernels, str)
        else kernels(weight_dtype)
    )
    make = partial(Encoder, family, config, kernel_set, weight_dtype)
    located = split_fused(locate(path), FUSED)
    _check_parts(path, config, located)
    return _filled(path, located, make, config, scheme, weight_dtype, device, progress)


class Loadable(Protocol):
    """A model that `_filled` makes and fills."""

    def linears(self) -> list[tuple[str, Linear]]: ...
    def embedding(self) -> tuple[str, Embedding]: ...
    def weights(self) -> dict[str, Tensor]: ...
    def canonical(self, name: str) -> str | None: ...
    def pack(self, fill: Fill) -> None: ...


M = TypeVar("M", bound=Loadable)


def _filled(
    path: Path,
    located: Mapping[str, LocatedTensor],
    make: Callable[[torch.device], M],
    config: Config,
    scheme: Scheme | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    processes: int = 1,
    cuts: Cuts = uncut,
) -> M:
    """The model that `make` makes for a device, with the weights of the checkpoint in `path`. Raises ModelError.

    `processes`: that load as much at the same time. `cuts`: see adopt.
    """
    # Made without memory first: config.json is checked against the checkpoint before anything is allocated.
    shape = make(torch.device("meta"))
    kept = None if scheme is None else adopt(path, shape, scheme, located, cuts)
    exact = frozenset[str]() if kept is None else kept.exact
    places = shape.weights()
    matched = match(path, located, places, shape.canonical if kept is None else kept.canonical)
    if device.type != "cpu":
        processes = 1  # each has a device of its own
    # What is read whole is then cut: all ranks together keep it once.
    check_weights(
        path, sum((1 if name in exact else processes) * weight.nbytes for name, weight in places.items()), device
    )
    if TYPES in config:
        dtype_name = str(dtype).removeprefix("torch.")
        weights = in_memory(config.get(TYPES), dtype_name, scheme is not None, gpu=device.type == "cuda")
        logger.info("%s: weights are %s", path.name, weights)
    model = make(device)
    if scheme is not None:
        adopt(path, model, scheme, located, cuts)
    with weights_of(matched, dtype, exact, progress) as fill:
        model.pack(fill)
    return model


def _check_parts(path: Path, config: Config, located: Mapping[str, LocatedTensor]) -> None:
    """Raise ModelError if config.json asks for more layers or experts than the checkpoint has tensors."""
    for name, counted in _PARTS.items():
        if name in config and config.integer(name) > len(located):
            raise ModelError(
                f"{path}: config.json asks for {config.integer(name)} {counted} ({name}); the checkpoint has "
                f"{len(located)} tensors"
            )


def shape_of(
    folder: str | Path,
    dtype: str,
    kernels: Callable[[torch.dtype], Kernels],
    quantization: str = "none",
    collectives: Collectives | None = None,
) -> Decoder:
    """The model in `folder` on the device "meta": it computes shapes and has no weights.

    It reads config.json alone. For a quantised checkpoint, it also reads scales, zero points and orders from the files.
    `collectives`: this rank's end, for its share of the model. Raises ModelError.
    """
    path = Path(folder)
    make, config, weight_dtype = _read(path, dtype)
    scheme = _scheme(path, config, quantization, torch.device("cuda"))
    kernel_set = kernels(weight_dtype)
    make_shape = partial(make, kernel_set, weight_dtype, torch.device("meta"))
    located = {} if scheme is None else separate(locate(path))
    cuts: Cuts = uncut
    if collectives is not None:
        check_ranks_of(path, collectives.share.ranks)
        if scheme is not None:
            settings = make.args[0].read(config)
            located, cuts = _divided(path, make_shape(), settings, scheme, located, collectives.share)
        kernel_set.collectives = collectives
    model = make_shape()
    if scheme is not None:
        kept = adopt(path, model, scheme, located, cuts)
        matched = match(path, located, model.weights(), kept.canonical)
        for matrix in kept.stored:
            matrix.to_host()
        with weights_of(matched, weight_dtype, kept.exact) as fill:
            fill({name: tensor for name, tensor in model.weights().items() if not tensor.is_meta})
    model.pack()
    return model


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a decoder in a folder."""

    settings: DecoderSettings
    dtype: torch.dtype
    elements: int
    """All weights, embeddings and norms included."""
    stored_bytes: int | None
    """Bytes of a quantised checkpoint's tensors; None for one that is not quantised."""


def size_of(folder: str | Path, dtype: str = "auto") -> Size:
    """The size of the decoder in `folder`, from its config.json and, of a quantised checkpoint, the headers of its
    files. Raises ModelError."""
    path = Path(folder)
    make, config, weight_dtype = _read(path, dtype)
    settings: DecoderSettings = make.args[0].read(config)
    experts = settings.layers * (settings.experts.count if settings.experts is not None else 1)
    if experts > _MOST_EXPERTS:
        raise ModelError(
            f"{path}: config.json asks for {experts} experts in all layers; at most {_MOST_EXPERTS} are read"
        )
    shape = make(Reference(weight_dtype), weight_dtype, torch.device("meta"))
    quantised = TYPES in config or any(config.get(name) is not None for name in SECTIONS)
    stored = sum(located.stored.nbytes for located in locate(path).values()) if quantised else None
    elements = sum(tensor.numel() for tensor in shape.weights().values())
    return Size(settings, weight_dtype, elements, stored)


def _scheme(path: Path, config: Config, quantization: str, device: torch.device) -> Scheme | None:
    scheme = read_scheme(config)
    if scheme is not None and scheme.pruned:
        skipped = device.type == "cuda" and scheme.form == "pruned" and quantization == "none"
        zeros = "skipped where the GPU can" if skipped else "multiplied, too"
        logger.info("%s: matrices are pruned 2:4; their zeros are %s", path.name, zeros)
        if scheme.form == "pruned" and not scheme.bitmask and (device.type != "cuda" or quantization != "none"):
            return None
    if scheme is not None and scheme.form == "gguf":
        # Dequantised instead: what is to be quantised otherwise, and experts on a GPU, which has no products for them.
        experts = any(config.get(name) for name in _PARTS if _PARTS[name] == "experts")
        return None if quantization != "none" or (device.type == "cuda" and experts) else scheme
    if scheme is not None and quantization != "none":
        raise ModelError(
            ErrorText.of(
                "{}: the checkpoint is quantised already; leave {quantization}={} out", path, repr(quantization)
            )
        )
    return scheme


def _read(path: Path, dtype: str, *, headless: bool = False) -> tuple[partial[Decoder], Config, torch.dtype]:
    """Read the folder's config.json: a function that makes the empty model, of kernels, dtype and device; the settings;
    the weights' dtype."""
    settings = read_config(path)
    names = architectures(settings)
    candidates = [*names, *(re.sub("(Text)?Model$", "", name) + "ForCausalLM" for name in names if headless)]
    name = next((name for name in candidates if name in FAMILIES), None)
    if name is None:
        if any(name in ENCODERS for name in names):
            raise ModelError(f"{path}: {names[0]} generates no text; `penstock worker` and PoolingEngine serve it")
        raise ModelError(
            f"{path}: config.json names the architectures {shown(names)}; supported are {', '.join(sorted(FAMILIES))}"
        )
    config = Config.of_model(settings | {"architectures": [name]})
    return partial(Decoder, FAMILIES[name], config), config, _dtype(path, config, dtype)


def _dtype(path: Path, config: Config, requested: str) -> torch.dtype:
    name = requested
    if requested == "auto":
        # transformers 5 writes "dtype", earlier versions "torch_dtype". Neither means float32.
        name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{path}: dtype {shown(name)} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


class Quantisable(Protocol):
    def linears(self) -> Iterable[tuple[str, Linear]]: ...
    def embedding(self) -> tuple[str, Embedding]: ...
    def canonical(self, name: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Adopted:
    exact: frozenset[str]
    """The names of tensors that are copied as stored, without rounding."""
    stored: tuple[Stored, ...]
    canonical: Callable[[str], str | None]
    """The model's `canonical`, which also skips tensors of quantised matrices that nothing uses."""


def adopt(
    folder: Path,
    model: Quantisable,
    scheme: Scheme,
    located: Mapping[str, LocatedTensor],
    cuts: Cuts = uncut,
) -> Adopted:
    """Set the stored form of each Linear of `model`, and of its embedding. Call it before asking for their weights.

    `cuts`: the part that the model has of each matrix, if it is one rank's share.
    Raises ModelError if no matrix is quantised, or if one does not fit `scheme`.
    """
    stored_tensors, names = _by_matrix(model, located)
    exact: set[str] = set()
    ignored: set[str] = set()
    every: list[Stored] = []

    def form_of(name: str, outputs: int, inputs: int, device: torch.device) -> Stored | None:
        cut = cuts(name)
        whole = (outputs, inputs) if cut is None else (cut.outputs, cut.inputs)
        form = stored_as(scheme.of(names.get(name, name)), name, *whole, stored_tensors[name], device)
        if form is not None:
            form = form if cut is None else NarrowedStored(form, cut.own_outputs, cut.own_inputs)
            every.append(form)
            exact.update(f"{name}.{end}" for end in form.places)
            ignored.update(f"{name}.{end}" for end in form.ignored() - form.places.keys())
        return form

    for prefix, linear in model.linears():
        stored = {}
        for part, outputs in linear.parts.items():
            form = form_of(prefix + part, outputs, linear.inputs, linear.device)
            if form is not None:
                stored[part] = form
        linear.store(stored, [part for part in stored if "bias" in stored_tensors[prefix + part]])
    name, embedding = model.embedding()
    embedding.store(form_of(name, *embedding.shape, embedding.device))
    if not exact:
        raise ModelError(f"{folder}: config.json has a quantization_config ({scheme.form}), and no matrix is quantised")

    def canonical(name: str) -> str | None:
        ours = model.canonical(name)
        return None if ours in ignored else ours

    return Adopted(frozenset(exact), tuple(every), canonical)


def _by_matrix(
    model: Quantisable, located: Mapping[str, LocatedTensor]
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, str]]:
    """The stored tensors by the names of their matrices, then by the ends of their own names; and the matrices' names
    in the checkpoint."""
    by_matrix: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    names: dict[str, str] = {}
    for name, located_tensor in located.items():
        ours = model.canonical(name)
        if ours is not None:
            matrix, _, end = ours.rpartition(".")
            by_matrix[matrix][end] = located_tensor.stored
            names[matrix] = located_tensor.name.rpartition(".")[0]
    return by_matrix, names
