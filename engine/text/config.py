"""Reads a model's config.json, with types and bounds, in one spelling. No torch.

It is untrusted data, and memory is sized by it: every number has a type and a bound, and a wrong one is refused by
name. transformers 5 and earlier versions spell rotary settings differently. Some checkpoints leave out their
architecture's defaults or put the decoder into `text_config`. Config hides these differences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.declared import shown
from engine.errors import ModelError
from engine.text.files import file_in, read_at_most

#: The largest config.json that is read, in bytes. Real ones have some kilobytes.
_LONGEST = 4 << 20
#: The largest size of a layer, a vocabulary and so on: some ten times the largest known. The product of two stays far
#: from overflow.
MOST_WIDTH = 1 << 22
MOST_LAYERS = 4096
MOST_CONTEXT = 1 << 27
#: The bound of numbers that have no bound of their own.
_LARGEST = 1e30
#: Suffixes of quantisation targets that are the output head, or the embedding that it may be tied to.
_HEADS = ("lm_head", "embed_tokens", "Embedding")

#: The parts that a quantisation target's pattern may have, and the most characters of all patterns together.
_PART = re.compile(r"\.\*|\\d\+|\\\.|[\w.-]|\([\w-]+(?:\|[\w-]+)*\)")
_LONGEST_PATTERNS = 1 << 14
#: The longest name of a matrix that is compared with patterns.
_LONGEST_NAME = 1000

#: transformers' defaults for settings that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "MixtralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    },
    "Qwen3MoeForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
    },
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "Gemma2ForCausalLM": {
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    # Complete, because the text_config of published checkpoints has only the differences from these.
    "Gemma3ForCausalLM": {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}
#: Maps architectures whose decoder's settings are in `text_config` to the decoder's architecture.
_NESTED = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


class Config:
    """An object of config.json. Its methods raise ModelError naming the setting, its value and what it must be."""

    def __init__(self, values: Mapping[str, Any], within: str = "") -> None:
        self._values = values
        self._within = within

    @classmethod
    def of_model(cls, values: Mapping[str, Any]) -> Config:
        """Make a Config from all of config.json, with its architecture's defaults and with `text_config` merged in."""
        names = architectures(values)
        name = next((name for name in names if name in _DEFAULTS or name in _NESTED), "")
        inner: Mapping[str, Any] = {}
        if name in _NESTED:
            section = values.get("text_config")
            if not isinstance(section, dict):
                raise ModelError(f"config.json: text_config={shown(section)} must be an object")
            name, inner = _NESTED[name], section
        return cls(_DEFAULTS.get(name, {}) | dict(values) | dict(inner))

    @property
    def values(self) -> Mapping[str, Any]:
        """All settings."""
        return self._values

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MOST_WIDTH) -> int:
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"must be an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float | None = None, *, low: float = 0.0, high: float = _LARGEST) -> float:
        """A number above `low`, at most `high`."""
        value = self._required(name, default)
        if not _is_number(value, low, high):
            raise self.wrong(name, f"must be a number above {low:g}, at most {high:g}")
        return float(value)

    def optional(self, name: str) -> float | None:
        """A number above 0, or None if the setting is absent."""
        return self.number(name) if name in self else None

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Exactly `length` numbers above 0."""
        values = self._required(name, None)
        if not isinstance(values, list) or len(values) != length or not all(map(_is_number, values)):
            raise self.wrong(name, f"must be a list of {length} numbers above 0, at most {_LARGEST:g}")
        return tuple(map(float, values))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, "must be a text")
        return value

    def wrong(self, name: str, why: str) -> ModelError:
        return ModelError(f"config.json: {self._within}{name}={shown(self.get(name))} {why}")

    def _required(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"config.json lacks {self._within}{name}")
        return value

    def replaced(self, **values: Any) -> Config:
        return Config(dict(self._values) | values, self._within)

    # ---- settings that several readers need

    def rope(self, layer_type: str = "full_attention") -> Config:
        """The rotary settings of the layers of one type, as transformers 5 writes them: rope_type, rope_theta,
        partial_rotary_factor, original_max_position_embeddings and the settings of the rope_type.
        """
        settings = self.get("rope_scaling") or self.get("rope_parameters") or {}
        name = "rope_scaling" if self.get("rope_scaling") else "rope_parameters"
        if not isinstance(settings, dict):
            raise self.wrong(name, "must be an object")
        theta = self.get("rope_theta")
        if any(kind in settings for kind in _LAYER_TYPES):
            settings = settings.get(layer_type) or {}
            if not isinstance(settings, dict):
                raise self.wrong(name, f"must have an object for {layer_type}")
        elif layer_type == "sliding_attention" and "rope_local_base_freq" in self:
            # Before transformers 5 the local layers had a base of their own, and were never scaled.
            settings = {}
        if layer_type == "sliding_attention" and "rope_local_base_freq" in self:
            theta = self.get("rope_local_base_freq")
        context = self.get("max_position_embeddings")
        values = {
            "rope_theta": theta,
            "partial_rotary_factor": self.get("partial_rotary_factor"),
            "original_max_position_embeddings": context,
        }
        values |= {key: value for key, value in settings.items() if value is not None}
        values["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
        values["max_position_embeddings"] = context
        if "original_max_position_embeddings" in self:
            # A model's own setting has precedence over that of its scaling.
            values["original_max_position_embeddings"] = self.get("original_max_position_embeddings")
        return Config(values, "rope's ")

    def context_length(self) -> int:
        """The most tokens of prompt and output together.

        Two kinds of rope scaling, dynamic and yarn, extend the context without a change of max_position_embeddings.
        """
        context = self.integer("max_position_embeddings", high=MOST_CONTEXT)
        rope = self.rope()
        stretched = 0
        if rope.get("rope_type") == "dynamic":
            stretched = int(context * rope.number("factor", high=1e4))
        elif rope.get("rope_type") == "yarn" and "factor" in rope:
            original = rope.integer("original_max_position_embeddings", high=MOST_CONTEXT)
            stretched = int(original * rope.number("factor", high=1e4))
        return min(max(context, stretched), MOST_CONTEXT)


def architectures(values: Mapping[str, Any]) -> list[str]:
    """The architectures that config.json names, [] if none. Raises ModelError if they are not a list of strings."""
    names = values.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json: architectures={shown(names)} must be a list of names")
    return names


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read a folder's config.json, or make one of a GGUF file. Raises ModelError if it is missing or not a JSON
    object."""
    from engine.text import gguf

    if (gguf_file := gguf.gguf_of(folder)) is not None:
        return gguf.config_of(gguf.read_gguf(gguf_file))
    path = file_in(Path(folder), "config.json")
    if path is None:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    data = read_at_most(path, _LONGEST)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits also raises ValueError.
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds a {type(values).__name__} where an object is expected")
    return values


def is_of_head(targets: object) -> bool:
    """Whether a quantisation group's targets are the output head or the embedding alone."""
    named = targets if isinstance(targets, list) else []
    return bool(named) and all(isinstance(target, str) and target.rstrip("$").endswith(_HEADS) for target in named)


class Targets:
    """The groups of a quantised checkpoint by their targets: names of matrices, patterns of names (`re:`) and classes
    of matrices, which begin with a capital.

    A pattern consists of names, `.`, `.*`, `\\d+`, `\\.` and alternatives in brackets. It is compared at all places of
    a name in one pass, so that it takes time in proportion to its length, whatever a file says.
    """

    def __init__(self, groups: Sequence[object]) -> None:
        """`groups`: the list of each group's targets. Raises ValueError for a pattern that has other parts."""
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, list[str]]] = []
        self._head: int | None = None
        #: The groups of classes other than the output head's.
        self.classes: list[int] = []
        length = 0
        for k, targets in enumerate(groups):
            named = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
            of_head = is_of_head(named)
            if of_head and self._head is None:
                self._head = k
            for target in named:
                if target.startswith("re:"):
                    length += len(target)
                    if length > _LONGEST_PATTERNS:
                        raise ValueError(f"makes the patterns longer than {_LONGEST_PATTERNS} characters together")
                    self._patterns.append((k, _parts(target)))
                elif not target[:1].isupper():
                    self._names.setdefault(target, k)
                elif not of_head and k not in self.classes[-1:]:
                    self.classes.append(k)

    def group(self, name: str) -> int:
        """The index of the group that holds for the matrix `name`: the first that names it, else the first of its
        class, else 0."""
        named = self._names.get(name)
        places = _places(name) if self._patterns and len(name) <= _LONGEST_NAME else None
        for k, parts in self._patterns:
            if named is not None and k >= named:
                break
            if places is not None and _fits(parts, len(name), places):
                return k
        if named is not None:
            return named
        if self._head is not None and name.endswith(_HEADS):
            return self._head
        return self.classes[0] if self.classes else 0


def _parts(target: str) -> list[str]:
    text = target.removeprefix("re:").removeprefix("^").removesuffix("$")
    parts = _PART.findall(text)
    if not parts or "".join(parts) != text:
        raise ValueError(f"{shown(target)} is not supported; names, '.', '.*', '\\d+' and (a|b) are")
    return parts if target.endswith("$") else [*parts, ".*"]


def _places(name: str) -> dict[str, int]:
    """The places of each character in a name, as the bits of a number."""
    places: dict[str, int] = {}
    for position, character in enumerate(name):
        places[character] = places.get(character, 0) | 1 << position
    return places


def _fits(parts: Sequence[str], length: int, places: Mapping[str, int]) -> bool:
    """Whether a pattern's parts make up the whole name of this length and these places."""
    every = (1 << length) - 1
    ends = 1  # the places where the parts so far may end
    for part in parts:
        if not ends:
            return False
        if part == ".*":
            ends = (2 * every + 1) & -(ends & -ends)  # from the first on
        elif part == ".":
            ends = (ends & every) << 1
        elif part == r"\d+":
            run = sum(places.get(digit, 0) for digit in "0123456789")
            ends, shift = ends & run, 1
            while shift < length:  # to the end of each run, in steps that double
                ends |= run & ends << shift
                run &= run << shift
                shift *= 2
            ends <<= 1
        else:
            begun, ends = ends, 0
            for option in part[1:-1].split("|") if part[0] == "(" else [part[-1]]:
                at = begun
                for character in option:
                    at = (at & places.get(character, 0)) << 1
                ends |= at
    return bool(ends >> length & 1)


def packed_bits(values: Mapping[str, Any]) -> Callable[[str], int]:
    """A function: the bits of one weight of the matrix of a name in a quantised checkpoint's 32-bit words. It returns
    32 if config.json does not say. Raises ModelError for targets that cannot be read."""
    section = values.get("quantization_config")
    quantisation = section if isinstance(section, dict) else {}
    groups = quantisation.get("config_groups")
    weighted = [
        group
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    widths = [group["weights"].get("num_bits") for group in weighted]
    widths = widths or [quantisation.get("bits") or quantisation.get("w_bit")]
    bits = [width if width in (4, 8) else 32 for width in widths]
    if len(set(bits)) == 1:
        return lambda name: bits[0]
    try:
        targets = Targets([group.get("targets") for group in weighted])
    except ValueError as error:
        raise ModelError(f"config.json: quantization_config has a target that {error}") from error
    return lambda name: bits[targets.group(name)]


def _is_number(value: object, low: float = 0.0, high: float = _LARGEST) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and low < value <= high
