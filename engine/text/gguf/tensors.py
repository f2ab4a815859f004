"""The tensors of a GGUF file by transformers' names, and how llama.cpp's layout of each is undone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from engine.errors import ModelError
from engine.text.gguf.config import config_of
from engine.text.gguf.header import GgufFile
from engine.text.tensors import LocatedTensor, StoredTensor

_WHOLE: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA: Final = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
#: What an architecture names otherwise.
_OTHERS: Final[dict[str, dict[str, str]]] = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}
#: Matrices of all experts of a layer, [experts, outputs, inputs].
_EXPERTS: Final = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
#: The tensors that config.json's rope scaling is read from.
_ROPE: Final = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_LAYER: Final = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)", re.ASCII)
_TENSOR: Final = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)
#: The most experts' matrices of a file.
_MOST_MATRICES: Final = 1 << 19


@dataclass(frozen=True, slots=True)
class GgufTensor(LocatedTensor):
    """A tensor, or one expert's part of it, in a GGUF file. Its rows are those of the last dimension."""

    offset: int = 0
    """Of its first byte in the file."""
    heads: int = 0
    """llama.cpp's llama has the two halves of each of so many heads interleaved; 0: rows are in order."""
    less: float = 0.0
    """Subtracted: llama.cpp stores the norms of Gemma with their 1."""
    whole: StoredTensor | None = None
    """The entry of the tensor of which this is `part`. None: it is all of it."""


def located_in(file: GgufFile) -> dict[str, LocatedTensor]:
    """The checkpoint's tensors by transformers' names. Those that no architecture has keep their own.

    Raises ModelError.
    """
    settings, architecture = config_of(file), file.get("general.architecture")
    names = _OF_LAYER | _OTHERS.get(architecture, {})
    located: dict[str, LocatedTensor] = {}
    for name, entry in file.tensors.items():
        if name in _ROPE:
            continue
        tensor = GgufTensor(entry.path, name, entry.stored, offset=entry.offset)
        for theirs, part in _named(name, tensor, names):
            if theirs in located:
                raise ModelError(f"{file.path} has {theirs} twice, as {located[theirs].name} and as {name}")
            located[theirs] = _in_transformers_layout(theirs, part, settings, architecture)
        if len(located) > _MOST_MATRICES:
            raise ModelError(f"{file.path} has more than {_MOST_MATRICES} matrices")
    return located


def _named(name: str, tensor: GgufTensor, names: dict[str, str]) -> Iterator[tuple[str, GgufTensor]]:
    if (match := _LAYER.fullmatch(name)) is not None:
        layer, kind, end = match[1], match[2], match[3]
        if kind in _EXPERTS and end == "weight" and len(tensor.stored.shape) == 3:
            yield from _experts(f"model.layers.{int(layer)}.mlp.experts", _EXPERTS[kind], tensor)
            return
        if kind in names:
            yield f"model.layers.{int(layer)}.{names[kind]}.{end}", tensor
            return
    elif (match := _TENSOR.fullmatch(name)) is not None and match[1] in _WHOLE:
        yield f"{_WHOLE[match[1]]}.{match[2]}", tensor
        return
    yield name, tensor


def _experts(block: str, matrix: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    count, outputs, inputs = tensor.stored.shape
    if count > _MOST_MATRICES:
        raise ModelError(f"{tensor.path}: {tensor.name} has {count} experts, more than are supported")
    stored = StoredTensor(tensor.stored.dtype, (outputs, inputs))
    for i in range(count):
        offset = tensor.offset + i * stored.nbytes
        yield f"{block}.{i}.{matrix}.weight", replace(tensor, stored=stored, offset=offset)


def _in_transformers_layout(theirs: str, tensor: GgufTensor, settings: dict[str, Any], architecture: str) -> GgufTensor:
    if architecture == "llama" and ".self_attn.q_proj." in theirs:
        return _with_heads(tensor, settings["num_attention_heads"])
    if architecture == "llama" and ".self_attn.k_proj." in theirs:
        return _with_heads(tensor, settings["num_key_value_heads"])
    if architecture in ("gemma2", "gemma3") and theirs.endswith("norm.weight"):
        return replace(tensor, less=1.0)
    return tensor


def _with_heads(tensor: GgufTensor, heads: Any) -> GgufTensor:
    rows = tensor.stored.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise ModelError(f"{tensor.path}: {tensor.name} has {rows} rows, which are not {heads} heads of two halves")
    return replace(tensor, heads=heads)
