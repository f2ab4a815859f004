"""config.json of a decoder, checked: a setting that would change the output is either served or refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError
from engine.layers import Llama3Scaling


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """Names are transformers', shortened; defaults are those of its LlamaConfig."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tied: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, settings: dict[str, Any]) -> DecoderSettings:
        """Raises ModelError naming the setting, its value and what is supported."""
        hidden_size = _positive(settings, "hidden_size")
        heads = _positive(settings, "num_attention_heads")
        kv_heads = _positive(settings, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        if settings.get("head_dim") is None and hidden_size % heads:
            raise ModelError(
                f"config.json: without head_dim, hidden_size={hidden_size} must be a multiple of "
                f"num_attention_heads={heads}"
            )
        head_dim = _positive(settings, "head_dim", hidden_size // heads)
        if head_dim % 2:
            raise ModelError(f"config.json: head_dim={head_dim} is odd; rotary embedding turns pairs")
        activation = settings.get("hidden_act", "silu")
        if activation != "silu":
            raise ModelError(f"config.json: hidden_act={activation!r} is not supported; only 'silu' is")
        # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
        rope = settings.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise ModelError(f"config.json: rope_parameters={rope!r} is not an object")
        return cls(
            layers=_positive(settings, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_positive(settings, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_positive(settings, "vocab_size"),
            context_length=_positive(settings, "max_position_embeddings", 2048),
            norm_eps=_number(settings, "rms_norm_eps", 1e-6),
            rope_theta=_number(rope if "rope_theta" in rope else settings, "rope_theta", 10000.0),
            rope_scaling=_scaling(rope or settings.get("rope_scaling")),
            tied=_flag(settings, "tie_word_embeddings"),
            attention_bias=_flag(settings, "attention_bias"),
            mlp_bias=_flag(settings, "mlp_bias"),
        )


def _scaling(given: Any) -> Llama3Scaling | None:
    if not given:
        return None
    if not isinstance(given, dict):
        raise ModelError(f"config.json: rope_scaling={given!r} is not an object")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"config.json: rope scaling {kind!r} is not supported; only 'default' and 'llama3' are")
    scaling = Llama3Scaling(
        factor=_number(given, "factor"),
        low_freq_factor=_number(given, "low_freq_factor"),
        high_freq_factor=_number(given, "high_freq_factor"),
        original_max_position_embeddings=_positive(given, "original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError(
            f"config.json: rope scaling's high_freq_factor={scaling.high_freq_factor} must be above its "
            f"low_freq_factor={scaling.low_freq_factor}"
        )
    return scaling


def _positive(settings: dict[str, Any], name: str, default: int | None = None) -> int:
    value = settings.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name}={value!r} must be a positive integer")
    return value


def _number(settings: dict[str, Any], name: str, default: float | None = None) -> float:
    value = settings.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: rope scaling lacks {name}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"config.json: {name}={value!r} must be a finite number above 0")
    return float(value)


def _flag(settings: dict[str, Any], name: str) -> bool:
    value = settings.get(name) or False
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name}={value!r} must be true or false")
    return value
