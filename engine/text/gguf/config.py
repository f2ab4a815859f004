"""The config.json and generation_config.json of a GGUF file, from its metadata.

Keys of a model begin with `general.architecture`. Mistral and Mixtral are `llama` there. Numbers are bounded where they
are used, as those of a real config.json.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from engine.declared import shown
from engine.errors import ModelError
from engine.text.config import MOST_LAYERS
from engine.text.gguf.header import GgufFile
from engine.text.tensors import BLOCKS, KEPT, KeptBlocks

#: The setting that only a GGUF file's configuration has: the number of weights by the type in which they are stored.
TYPES: Final = "gguf_types"
#: The dtype in which weights of a type are computed. Quantised ones are computed in bf16.
_DTYPES: Final = {"F32": "float32", "F16": "float16"}
#: The ends of turns and texts by their spelling, for files that name one end only.
_ENDS: Final = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "<|end_of_text|>"}
)
_CONTROL: Final = 3
#: The fewest inputs of a group of weights on a GPU (engine/kernels/gpu.py).
_GPU_GROUP: Final = 32
#: The layers of the largest models of Gemma 2 and 3, which scale scores by another width than a head's.
_WIDE_GEMMAS: Final = {"gemma2": 46, "gemma3": 62}
#: general.sampling's keys and generation_config.json's.
_SAMPLING: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class _Metadata:
    """A file's metadata under its architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.get("general.architecture")
        if not isinstance(architecture, str):
            raise ModelError(f"{file.path} names no general.architecture")
        self.architecture = architecture

    def get(self, name: str, default: Any = None) -> Any:
        value = self.file.get(f"{self.architecture}.{name}")
        return default if value is None else value

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self.file.path} lacks {self.architecture}.{name}")
        return value

    def uniform(self, name: str) -> Any:
        """A number that may be a list with one for each layer, which must be alike. None if there is none."""
        key = f"{self.architecture}.{name}"
        if self.file.length(key) > MOST_LAYERS:
            raise ModelError(f"{self.file.path}: {key} has {self.file.length(key)} entries; at most {MOST_LAYERS}")
        values = set(self.file.numbers(key))
        if len(values) > 1:
            raise ModelError(f"{self.file.path}: {key} differs between layers, which is not served")
        return next(iter(values), None)

    def layers(self) -> int:
        count = self.required("block_count")
        if type(count) is not int or not 1 <= count <= MOST_LAYERS:
            raise ModelError(
                f"{self.file.path}: {self.architecture}.block_count={shown(count)} must be from 1 to {MOST_LAYERS}"
            )
        return count

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors


def config_of(file: GgufFile) -> dict[str, Any]:
    """The settings as a config.json has them. Raises ModelError naming the file and what is not served."""
    metadata = _Metadata(file)
    read = _ARCHITECTURES.get(metadata.architecture)
    if read is None:
        raise ModelError(
            f"{file.path} has general.architecture={shown(metadata.architecture)}, which is not served; "
            f"{', '.join(_ARCHITECTURES)} are"
        )
    settings = _shared(metadata) | read(metadata)
    settings |= _ends(file, settings["vocab_size"])
    settings[TYPES] = _types(file)
    return {name: value for name, value in settings.items() if value is not None}


def _types(file: GgufFile) -> dict[str, int]:
    """The number of weights by the type in which they are stored, the commonest first."""
    counts: Counter[str] = Counter()
    for entry in file.tensors.values():
        counts[entry.stored.dtype] += math.prod(entry.stored.shape)
    return dict(counts.most_common())


def in_memory(types: Mapping[str, int], dtype: str, kept: bool = True, *, gpu: bool = False) -> str:
    """A text for people: what becomes of a file's weights in memory, the bytes that they take there, and how many times
    those of the file that is.

    `types`: the number of weights by type. `dtype`: of weights that are not quantised in memory. `kept`: whether
    quantised weights stay so. `gpu`: whether Triton's kernels multiply them.
    """
    total, memory, stored, parts = sum(types.values()), 0.0, 0, []
    for kind, count in types.items():
        numbers, size = BLOCKS.get(kind) or (1, 4 if kind == "F32" else 2)
        stored += count // numbers * size
        if kind in KEPT and kept:
            bits, how = _bits_in_memory(KEPT[kind], gpu)
        else:
            bits = 32.0 if dtype == "float32" else 16.0
            how = f"dequantised to {dtype}" if kind in KEPT else f"as {dtype}"
        memory += count * bits / 8
        if count >= total / 200:
            parts.append(f"{kind} ({count / total:.0%}) {how}")
    times = memory / stored if stored else 1.0
    return f"{', '.join(parts)}: {memory / 1e6:,.1f} MB in memory, {times:.2f} times the file's"


def _bits_in_memory(kept: KeptBlocks, gpu: bool) -> tuple[float, str]:
    """The bits of a weight, with its share of a scale, and what is done to it."""
    if gpu and (kept.minima or kept.group < _GPU_GROUP):
        # With scales in fp32.
        return 8 + 32 / _GPU_GROUP, "rounded to 8 bits"
    if gpu and kept.bits < 8:
        return replace(kept, bits=4 if kept.bits == 4 else 8).bits_per_weight, "as it is"
    return kept.bits_per_weight, "as it is"


def _shared(m: _Metadata) -> dict[str, Any]:
    heads = m.uniform("attention.head_count")
    width = m.required("embedding_length")
    if type(heads) is not int or type(width) is not int or heads < 1:
        raise ModelError(f"{m.file.path}: {m.architecture}.attention.head_count={shown(heads)} is no number of heads")
    table = m.file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{m.file.path} has no tensor token_embd.weight")
    rotated = m.get("rope.dimension_count")
    head_dim = m.get("attention.key_length", width // heads)
    if m.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{m.file.path}: values of another width than keys ({head_dim}) are not served")
    if m.architecture == "llama" and m.get("attention.key_length") is None and rotated is not None:
        head_dim = rotated
    return {
        "dtype": _DTYPES.get(next(iter(_types(m.file))), "bfloat16"),
        "num_hidden_layers": m.layers(),
        "hidden_size": width,
        "intermediate_size": m.uniform("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if m.uniform("attention.head_count_kv") is None
        else m.uniform("attention.head_count_kv"),
        "head_dim": head_dim,
        "vocab_size": table.stored.shape[0],
        "max_position_embeddings": m.required("context_length"),
        "rms_norm_eps": m.required("attention.layer_norm_rms_epsilon"),
        "rope_theta": m.get("rope.freq_base", 10000.0),
        "partial_rotary_factor": _part(rotated, head_dim),
        "rope_scaling": _rope_scaling(m),
        "tie_word_embeddings": not m.has("output.weight"),
        "attention_bias": m.has("blk.0.attn_q.bias"),
    }


def _part(rotated: Any, head_dim: Any) -> float | None:
    """The part of a head's dimensions that turn; None for all."""
    if type(rotated) is not int or type(head_dim) is not int or rotated == head_dim or head_dim < 1:
        return None
    return rotated / head_dim


def _rope_scaling(m: _Metadata) -> dict[str, Any] | None:
    if m.has("rope_factors_long.weight") and m.has("rope_factors_short.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": m.file.floats("rope_factors_short.weight"),
            "long_factor": m.file.floats("rope_factors_long.weight"),
            "attention_factor": m.get("rope.scaling.attn_factor"),
        }
    if m.has("rope_freqs.weight"):
        divisors = m.file.floats("rope_freqs.weight")
        return _llama3(divisors, m.get("rope.freq_base", 10000.0)) or {"rope_type": "divisors", "divisors": divisors}
    kind = m.get("rope.scaling.type")
    factor = m.get("rope.scaling.factor", m.get("rope.scale_linear"))
    if kind is None:
        kind = "none" if factor is None else "linear"
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": m.required("rope.scaling.original_context_length"),
            "attention_factor": m.get("rope.scaling.yarn_attn_factor", m.get("rope.scaling.attn_factor")),
            "beta_fast": m.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": m.get("rope.scaling.yarn_beta_slow"),
        }
    raise ModelError(
        f"{m.file.path}: {m.architecture}.rope.scaling.type={shown(kind)} is not served; none, linear and yarn are"
    )


def _llama3(divisors: list[float], theta: Any) -> dict[str, Any] | None:
    """The settings that gave these divisors, if they are as in all Llamas since 3.1. None otherwise."""
    factor, low, high, original = max(divisors), 1.0, 4.0, 8192
    if not isinstance(theta, float) or not 1 < theta < math.inf or not 1 < factor < math.inf:
        return None
    for i, divisor in enumerate(divisors):
        turns = original * theta ** (-i / len(divisors)) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(1 / divisor if divisor else 0.0, (1 - blend) / factor + blend, rel_tol=1e-4):
            return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(m: _Metadata) -> dict[str, Any]:
    window = m.uniform("attention.sliding_window") or None
    if m.get("expert_count", 0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": m.get("expert_count"),
            "num_experts_per_tok": m.required("expert_used_count"),
            "sliding_window": window,
        }
    if window is not None:
        return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return {"architectures": ["LlamaForCausalLM"], "mlp_bias": m.has("blk.0.ffn_gate.bias")}


def _qwen2(m: _Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}


def _qwen3(m: _Metadata) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}


def _qwen3_moe(m: _Metadata) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": False,
        "num_experts": m.required("expert_count"),
        "num_experts_per_tok": m.required("expert_used_count"),
        "moe_intermediate_size": m.required("expert_feed_forward_length"),
        # llama.cpp always divides shares by their sum.
        "norm_topk_prob": True,
    }


def _phi3(m: _Metadata) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": m.get("attention.sliding_window") or None,
        "original_max_position_embeddings": m.get("rope.scaling.original_context_length"),
    }


def _gemma2(m: _Metadata) -> dict[str, Any]:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": m.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": m.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(m),
    }


def _gemma3(m: _Metadata) -> dict[str, Any]:
    window, layers = m.get("attention.sliding_window"), m.layers()
    pattern = m.get("attention.sliding_window_pattern", 6)
    if window is None:
        kinds = ["full_attention"] * layers
    elif m.file.length("gemma3.attention.sliding_window_pattern"):
        slides = m.file.numbers("gemma3.attention.sliding_window_pattern")[:layers]
        kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    elif type(pattern) is int and pattern > 0:
        kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    else:
        raise ModelError(f"{m.file.path}: gemma3.attention.sliding_window_pattern={shown(pattern)} is no period")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": kinds,
        "sliding_window": window,
        "rope_theta": m.get("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": m.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": m.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _gemma_scale(m),
    }


def _gemma_scale(m: _Metadata) -> float:
    """The number by whose root scores are divided: a head's width, but in the largest model of each kind."""
    width, heads = m.required("embedding_length"), m.uniform("attention.head_count")
    if m.layers() == _WIDE_GEMMAS[m.architecture]:
        return float(width // heads)
    return float(m.get("attention.key_length", width // heads))


_ARCHITECTURES: Final[dict[str, Callable[[_Metadata], dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def _ends(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """bos_token_id, and eos_token_id with every token that ends an output."""

    def token(name: str) -> int | None:
        value = file.get(f"tokenizer.ggml.{name}_token_id")
        # llama.cpp takes one beyond the vocabulary for none, too.
        return value if type(value) is int and 0 <= value < vocab_size else None

    ends = [end for end in (token("eos"), token("eot"), token("eom")) if end is not None]
    kinds = file.numbers("tokenizer.ggml.token_type")
    tokens = file.texts("tokenizer.ggml.tokens")
    ends += [i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == _CONTROL and text in _ENDS]
    return {"bos_token_id": token("bos"), "eos_token_id": list(dict.fromkeys(ends)) or None}


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """The sampling parameters that the file recommends, as a generation_config.json has them."""
    recommended = {theirs: file.get(f"general.sampling.{ours}") for ours, theirs in _SAMPLING.items()}
    return {name: value for name, value in recommended.items() if value is not None}
