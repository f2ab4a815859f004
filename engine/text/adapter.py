"""Reads the description of a LoRA adapter in PEFT's format: its configuration and the shapes of its tensors. No torch.

A folder has `adapter_config.json` and `adapter_model.safetensors`. For a matrix W, [outputs, inputs], of the base the
latter has A, [rank, inputs], and B, [outputs, rank]; the adapted matrix is W + scale * B A (arXiv 2106.09685). The
scale is alpha / rank, or alpha / sqrt(rank) with `use_rslora` (arXiv 2312.03732).
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from engine.declared import shown
from engine.errors import ModelError
from engine.text.files import file_in, read_at_most
from engine.text.tensors import LocatedTensor, StoredTensor, read_header

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_RANK: Final = 256
#: The floating types of an adapter's tensors, as safetensors spells them.
DTYPES: Final = ("F32", "F16", "BF16")
_MAX_CONFIG_BYTES = 1 << 20
_MAX_PATTERNS = 10_000
#: The prefix that PEFT gives to the names of the base's tensors.
_PREFIX = "base_model.model."
#: Settings of PEFT that change what an adapter computes, with the values that leave it a plain LoRA.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "megatron_config": ({},),
    "arrow_config": ({},),
    "kasa_config": ({},),
    "monteclora_config": ({},),
    "velora_config": ({},),
}
#: Initialisations after which A and B alone are the adapter. Others, such as PiSSA, change the base's weights too.
_INITS = (True, False, "gaussian", "eva", "orthogonal")
#: The alphabet of a pattern that names modules literally. PEFT allows any regular expression.
_LITERAL = re.compile(r"(\^|\.\*\\\.)?[A-Za-z0-9_.]+")
#: A module of fused experts. PEFT nests the changes of its two products.
_EXPERTS = re.compile(r"(.+\.experts)(\.base_layer)*")
_PARTS: Final = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
}


@dataclass(frozen=True, slots=True)
class LowRankTensors:
    """The two tensors of an adapted matrix, and the factor of their product."""

    a: LocatedTensor
    """[rank, inputs]. Of an embedding, [rank, vocabulary]."""
    b: LocatedTensor
    """[outputs, rank]."""
    scale: float

    @property
    def rank(self) -> int:
        return self.a.stored.shape[0]


@dataclass(frozen=True, slots=True)
class StackedTensors:
    """The two tensors of one product of all experts of a layer (`target_parameters`): gate_up_proj or down_proj."""

    a: LocatedTensor
    """[experts * rank, inputs]: one expert's A below another's."""
    b: LocatedTensor
    """[outputs, rank * experts]: for each rank one column of each expert."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its folder describes it. Module names are those of the base's checkpoint."""

    folder: Path
    version: str
    """12 hex digits that change when the adapter's configuration or weights do."""
    base: str
    """The base's name as the adapter's author wrote it; "" if that is missing."""
    matrices: Mapping[str, LowRankTensors]
    """By module name, such as "model.layers.0.self_attn.q_proj"."""
    embeddings: Mapping[str, LowRankTensors]
    """The same for an embedding, whose A is read by columns."""
    whole: Mapping[str, LocatedTensor]
    """Matrices that replace the base's, by module name (`modules_to_save`)."""
    stacks: Mapping[str, Sequence[StackedTensors]]
    """Changes of all experts of a layer, by module name, such as "model.layers.0.mlp.experts"."""
    scales: Scales

    @property
    def rank(self) -> int:
        """The largest rank of a matrix, 0 if all matrices are whole. That of stacked experts is the configuration's:
        how many they are, only the base tells."""
        ranks = [pair.rank for pair in (*self.matrices.values(), *self.embeddings.values())]
        return max(ranks, default=self.scales.rank if self.stacks else 0)

    def scale(self, parameter: str, rank: int) -> float:
        """The factor of a product of stacked experts, such as "model.layers.0.mlp.experts.down_proj"."""
        return self.scales.scale(parameter, rank)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors as they are stored."""
        pairs = [tensor for pair in (*self.matrices.values(), *self.embeddings.values()) for tensor in (pair.a, pair.b)]
        stacks = [tensor for pairs in self.stacks.values() for pair in pairs for tensor in (pair.a, pair.b)]
        return sum(tensor.stored.nbytes for tensor in (*pairs, *stacks, *self.whole.values()))


def read_adapter(folder: str | Path) -> AdapterFiles:
    """Read the description of the adapter in `folder`: its configuration and the header of its weights.

    Raises ModelError naming the file, setting or tensor at fault. The values are read when it is loaded
    (`engine.adapters`), and whether it fits a base is told there.
    """
    root = Path(folder)
    config = _read_config(root)
    path = file_in(root, WEIGHTS)
    if path is None:
        pickled = file_in(root, "adapter_model.bin") is not None
        raise ModelError(
            f"{root} has no {WEIGHTS}"
            + ("; adapter_model.bin can run code: save the adapter with safe_serialization=True" if pickled else "")
        )
    try:
        stored = read_header(path)
        version = _version(root / CONFIG, path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    pairs, whole = _by_module(path, stored)
    scales = Scales(root, config)
    stacks: dict[str, list[StackedTensors]] = defaultdict(list)
    low_rank: dict[bool, dict[str, LowRankTensors]] = {False: {}, True: {}}
    for (module, embeds), tensors in pairs.items():
        _check_pair(path, module, tensors)
        if not embeds and (experts := _EXPERTS.fullmatch(module)):
            stacks[experts[1]].append(StackedTensors(tensors["a"], tensors["b"]))
            continue
        low_rank[embeds][module] = _pair(path, module, tensors, scales)
    if not pairs and not whole:
        raise ModelError(f"{path} has no tensors")
    base = config.get("base_model_name_or_path")
    return AdapterFiles(
        root,
        version,
        base if isinstance(base, str) else "",
        low_rank[False],
        low_rank[True],
        {module: LocatedTensor(path, name, stored[name]) for module, name in whole.items()},
        stacks,
        scales,
    )


def _read_config(root: Path) -> dict[str, Any]:
    path = file_in(root, CONFIG)
    if path is None:
        raise ModelError(f"{root} has no {CONFIG}: it is no folder of a PEFT adapter")
    data = read_at_most(path, _MAX_CONFIG_BYTES)
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type={shown(config.get('peft_type'))} is not supported; LORA is")
    for name, plain in _PLAIN.items():
        value = config.get(name)
        if value is not None and value not in plain:
            raise ModelError(f"{path}: {name}={shown(value)} is not supported; plain LoRA and rsLoRA are")
    init = config.get("init_lora_weights", True)
    if init not in _INITS:
        raise ModelError(
            f"{path}: init_lora_weights={shown(init)} changes the base's weights; convert the adapter to a plain LoRA "
            f"(save_pretrained with path_initial_model_for_weight_conversion)"
        )
    return config


class Scales:
    """The factor of each module's product, from `lora_alpha`, `alpha_pattern` and `use_rslora`."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        self._path = root / CONFIG
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._root = config.get("use_rslora") is True
        rank = config.get("r", 8)
        self.rank = rank if type(rank) is int and 1 <= rank <= MAX_RANK else 0
        """The rank that the configuration declares, 0 if it declares none that is served."""
        patterns = config.get("alpha_pattern") or {}
        if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
            raise ModelError(f"{self._path}: alpha_pattern is not an object of at most {_MAX_PATTERNS} modules")
        self._patterns = {}
        for pattern, alpha in patterns.items():
            if not _LITERAL.fullmatch(pattern):
                raise ModelError(
                    f"{self._path}: alpha_pattern has {shown(pattern)}; only names of modules are supported, no other "
                    f"regular expressions"
                )
            self._patterns[pattern] = self._number("alpha_pattern", alpha)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < abs(value) < 1e6:
            raise ModelError(f"{self._path}: {name}={shown(value)} is not a number between 0 and 1,000,000")
        return float(value)

    def scale(self, module: str, rank: int) -> float:
        alpha = next((alpha for pattern, alpha in self._patterns.items() if _matches(pattern, module)), self._alpha)
        return alpha / (math.sqrt(rank) if self._root else rank)


def _matches(pattern: str, module: str) -> bool:
    """Whether PEFT's pattern, a literal one, names `module`: it is the module's name or its last parts."""
    whole, pattern = pattern.startswith("^"), pattern.removeprefix(".*\\.")
    return module == pattern[1:] if whole else module == pattern or module.endswith(f".{pattern}")


def _by_module(
    path: Path, stored: Mapping[str, StoredTensor]
) -> tuple[dict[tuple[str, bool], dict[str, LocatedTensor]], dict[str, str]]:
    """The tensors of a file: those of low-rank pairs by module and whether it is an embedding, and the names of whole
    matrices by module."""
    pairs: dict[tuple[str, bool], dict[str, LocatedTensor]] = defaultdict(dict)
    whole: dict[str, str] = {}
    for name, tensor in stored.items():
        if not name.startswith(_PREFIX):
            raise ModelError(f"{path}: {shown(name)} does not begin with {_PREFIX!r}, as PEFT's names do")
        if tensor.dtype not in DTYPES:
            raise ModelError(f"{path}: {name} is stored as {tensor.dtype}; one of {', '.join(DTYPES)} is expected")
        if len(tensor.shape) != 2:
            raise ModelError(f"{path}: {name} has shape {list(tensor.shape)}; a matrix is expected")
        module = name.removeprefix(_PREFIX)
        end = next((end for end in _PARTS if module.endswith(f".{end}")), None)
        if end is not None:
            kind = _PARTS[end]
            key = module.removesuffix(f".{end}"), kind.startswith("embedding")
            pairs[key][kind.removeprefix("embedding_")] = LocatedTensor(path, name, tensor)
        elif module.endswith(".base_layer.weight"):
            continue  # a copy of the base's embedding, which PEFT saves beside an adapted one
        elif module.endswith(".weight") and ".lora_" not in module:
            whole[module.removesuffix(".weight")] = name
        else:
            raise ModelError(f"{path}: {name} is not supported; LoRA's A and B and whole matrices are")
    return pairs, whole


def _check_pair(path: Path, module: str, tensors: Mapping[str, LocatedTensor]) -> None:
    missing = [part for part in "ab" if part not in tensors]
    if missing:
        raise ModelError(f"{path}: {module} has no lora_{missing[0].upper()}")
    a, b = tensors["a"], tensors["b"]
    if b.stored.shape[1] != (rank := a.stored.shape[0]):
        raise ModelError(f"{path}: {b.name} has rank {b.stored.shape[1]}, and {a.name} has rank {rank}")


def _pair(path: Path, module: str, tensors: Mapping[str, LocatedTensor], scales: Scales) -> LowRankTensors:
    a, b = tensors["a"], tensors["b"]
    rank = a.stored.shape[0]
    if not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{path}: {a.name} has rank {rank}; ranks are from 1 to {MAX_RANK}")
    return LowRankTensors(a, b, scales.scale(module, rank))


def _version(config: Path, weights: Path) -> str:
    digest = sha256()
    for path in (config, weights):
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        digest.update(b"|")
    return digest.hexdigest()[:12]
