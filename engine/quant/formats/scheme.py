"""Reads config.json's quantization_config: the format of a checkpoint's quantised matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.errors import ModelError
from engine.text.config import Config, Targets
from engine.text.gguf import TYPES
from engine.text.tensors import BLOCKS

Form = Literal["gptq", "awq", "packed", "int8", "fp8", "gguf", "pruned"]

_WITHIN = "quantization_config's "
_METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
_GPTQ_FORMATS = ("gptq", "gptq_v2")
#: Maps compressed-tensors' names of formats to the engine's.
_COMPRESSED = {"pack-quantized": "packed", "int-quantized": "int8", "float-quantized": "fp8", "naive-quantized": "fp8"}
#: The formats of pruned matrices, in compressed-tensors' words, and the structure of those that are not dense.
_DENSE, _BITMASK, _TWO_OF_FOUR = "dense", "sparse-24-bitmask", "2:4"
#: The keys of config.json that may have the description; the second is compressed-tensors' older one.
SECTIONS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format and settings of a checkpoint's quantised matrices."""

    form: Form
    bits: int
    group: int | None = None
    """The number of inputs that share a scale; None: all."""
    zeros: bool = False
    """Whether there are zero points."""
    one_less: bool = False
    """Whether zero points are stored less one (GPTQ's first version)."""
    shuffled: bool = False
    """Whether inputs are grouped out of order."""
    block: tuple[int, int] | None = None
    """FP8: the block (outputs, inputs) that shares a scale. None: one scale for each output, or one for all."""
    targets: Targets | None = None
    """The groups where matrices are quantised in several ways; None: all are alike."""
    each: tuple[Scheme, ...] = ()
    """The scheme of each of these groups."""
    pruned: bool = False
    """Whether two of four adjacent inputs are zero, in the matrices that the checkpoint has pruned. The form "pruned"
    is of those that are not quantised."""
    bitmask: bool = False
    """Whether these are stored without the zeros, with a mask of the others."""

    def of(self, name: str) -> Scheme:
        """The scheme of the matrix `name`."""
        return self if self.targets is None else self.each[self.targets.group(name)]

    def groups(self, inputs: int) -> int:
        """The number of groups of `inputs` inputs. Raises ModelError if that is not a whole number."""
        if self.group is None:
            return 1
        if inputs % self.group:
            raise ModelError(
                f"config.json: {_WITHIN}group_size={self.group} does not divide a matrix's {inputs} inputs"
            )
        return inputs // self.group


def read_scheme(config: Config) -> Scheme | None:
    """Read the scheme. None if the checkpoint is not quantised. Raises ModelError naming an unsupported setting."""
    types = config.get(TYPES)
    if isinstance(types, dict) and types.keys() & BLOCKS.keys():
        return Scheme("gguf", 8)
    name = next((name for name in SECTIONS if name in config), None)
    if name is None:
        return None
    value = config.get(name)
    if not isinstance(value, dict):
        raise config.wrong(name, "must be an object")
    section = Config(value, _WITHIN)
    method = section.text("quant_method")
    if method not in _METHODS:
        raise section.wrong("quant_method", f"is not supported; {', '.join(_METHODS)} are")
    return {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}[method](section)


def _gptq(section: Config) -> Scheme:
    bits = section.integer("bits")
    if bits not in (4, 8):
        raise section.wrong("bits", "is not supported; 4 and 8 are")
    stored = section.text("checkpoint_format", "gptq")
    if stored not in _GPTQ_FORMATS:
        raise section.wrong("checkpoint_format", f"is not supported; {' and '.join(_GPTQ_FORMATS)} are")
    if section.text("pack_dtype", "int32") != "int32":
        raise section.wrong("pack_dtype", "is not supported; int32 is")
    rules = section.get("dynamic") or {}
    # Exclusions change nothing, because the tensors tell which matrices are quantised.
    if not isinstance(rules, dict) or not all(rule.startswith("-:") for rule in rules):
        raise section.wrong("dynamic", "is not supported but for exclusions: all matrices must be quantised alike")
    return Scheme(
        "gptq",
        bits,
        _group(section, "group_size"),
        zeros=True,
        one_less=stored == "gptq",
        shuffled=section.flag("desc_act"),
    )


def _awq(section: Config) -> Scheme:
    width = "bits" if "bits" in section else "w_bit"
    if section.integer(width) != 4:
        raise section.wrong(width, "is not supported; 4 is")
    if section.text("version", "gemm").lower() != "gemm":
        raise section.wrong("version", "is not supported; 'gemm' is")
    if not section.flag("zero_point", default=True):
        raise section.wrong("zero_point", "is not supported; true is")
    return Scheme("awq", 4, _group(section, "group_size" if "group_size" in section else "q_group_size"), zeros=True)


def _fp8(section: Config) -> Scheme:
    if "fmt" in section and section.text("fmt") != "e4m3":
        raise section.wrong("fmt", "is not supported; 'e4m3' is")
    return Scheme("fp8", 8, block=_block(section, "weight_block_size"))


def _compressed(section: Config) -> Scheme | None:
    pruned, bitmask = _sparsity(section)
    if section.text("format", _DENSE) == _DENSE and not section.get("config_groups"):
        return Scheme("pruned", 16, pruned=True, bitmask=bitmask) if pruned else None
    scheme = _of_groups(section)
    if bitmask and scheme.form not in ("int8", "fp8"):
        raise section.wrong("format", f"is not supported with {_BITMASK}; int-quantized and float-quantized are")
    each = tuple(replace(part, pruned=pruned, bitmask=bitmask) for part in scheme.each)
    return replace(scheme, pruned=pruned, bitmask=bitmask, each=each)


def _sparsity(section: Config) -> tuple[bool, bool]:
    """Whether matrices are pruned 2:4, and whether they are then stored without their zeros."""
    value = section.get("sparsity_config")
    if value is None or value == {}:
        return False, False
    if not isinstance(value, dict):
        raise section.wrong("sparsity_config", "must be an object")
    sparsity = Config(value, f"{_WITHIN}sparsity_config ")
    stored, structure = sparsity.text("format", _DENSE), sparsity.text("sparsity_structure", "unstructured")
    if stored not in (_DENSE, _BITMASK):
        raise sparsity.wrong("format", f"is not supported; {_DENSE} and {_BITMASK} are")
    if stored == _BITMASK and structure != _TWO_OF_FOUR:
        raise sparsity.wrong("sparsity_structure", f"is not supported with {_BITMASK}; {_TWO_OF_FOUR!r} is")
    return structure == _TWO_OF_FOUR, stored == _BITMASK


def _of_groups(section: Config) -> Scheme:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise section.wrong("config_groups", "must be an object of at least one group")
    schemes = tuple(_of_group(section, group) for group in groups.values())
    if all(scheme == schemes[0] for scheme in schemes):
        return schemes[0]
    named = [group.get("targets") for group in groups.values()]
    for each in named:
        if not isinstance(each, list) or not each or not all(isinstance(target, str) for target in each):
            raise section.wrong("config_groups", "must have a list of names as targets of each group")
    try:
        targets = Targets(named)
    except ValueError as error:
        raise section.wrong("config_groups", f"has a target that {error}") from error
    if len(targets.classes) > 1:
        raise section.wrong("config_groups", "is not supported: a class of matrices must be quantised alike")
    return replace(schemes[0], targets=targets, each=schemes)


def _of_group(section: Config, group: dict[str, Any]) -> Scheme:
    if not isinstance(group.get("weights"), dict):
        raise section.wrong("config_groups", "must have weights in each group")
    stored = section.text("format")
    if stored not in _COMPRESSED:
        raise section.wrong("format", f"is not supported; {', '.join(_COMPRESSED)} are")
    if _COMPRESSED[stored] == "packed" and group.get("input_activations"):
        raise section.wrong("config_groups", "is not supported: activations of packed weights are not quantised")
    weights = Config(group["weights"], f"{_WITHIN}weights ")
    bits, strategy = weights.integer("num_bits"), weights.text("strategy", "tensor")
    kind = weights.text("type", "int")
    if (_COMPRESSED[stored], kind, bits) not in (
        ("packed", "int", 4),
        ("packed", "int", 8),
        ("int8", "int", 8),
        ("fp8", "float", 8),
    ):
        raise weights.wrong("num_bits", f"with type {kind!r} is not supported for {stored}")
    if kind == "float":
        if strategy not in ("tensor", "channel", "block"):
            raise weights.wrong("strategy", "is not supported for FP8; tensor, channel and block are")
        return Scheme("fp8", 8, block=_block(weights, "block_structure") if strategy == "block" else None)
    if strategy not in ("channel", "group"):
        raise weights.wrong("strategy", "is not supported; channel and group are")
    zeros = not weights.flag("symmetric", default=True)
    if zeros and stored == "int-quantized":
        raise weights.wrong("symmetric", "is not supported for int-quantized; true is")
    return Scheme(
        "packed" if stored == "pack-quantized" else "int8",
        bits,
        _group(weights, "group_size") if strategy == "group" else None,
        zeros=zeros,
        shuffled=weights.get("actorder") == "group",
    )


def _group(section: Config, name: str) -> int | None:
    if section.get(name) == -1:
        return None
    group = section.integer(name)
    if group not in (32, 64, 128):
        raise section.wrong(name, "is not supported; 32, 64, 128 and -1 are")
    return group


def _block(section: Config, name: str) -> tuple[int, int] | None:
    if name not in section:
        return None
    sizes = section.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise section.wrong(name, "must be two sizes")
    return sizes[0], sizes[1]
