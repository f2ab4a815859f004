"""Rotary embedding settings, read from the section of config.json that Config.rope returns."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelError
from engine.layers import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from engine.text.config import MOST_CONTEXT, Config


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """The rotary embedding of some layers."""

    rotary_dim: int
    theta: float
    scaling: RopeScaling

    @classmethod
    def read(cls, config: Config, head_dim: int) -> RopeSettings:
        """Read the settings from `config`, a section that Config.rope returned."""
        part = config.number("partial_rotary_factor", 1.0, high=1.0)
        rotary_dim = int(head_dim * part)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ModelError(
                f"config.json: head_dim={head_dim} and partial_rotary_factor={part:g} make {rotary_dim} dimensions "
                f"turn; rotary embedding turns pairs"
            )
        theta = config.number("rope_theta", 10000.0, low=1.0)
        return cls(rotary_dim, theta, _scaling(config, rotary_dim))


def _scaling(config: Config, rotary_dim: int) -> RopeScaling:
    kind = config.text("rope_type")
    if kind == "default":
        return RopeScaling()
    readers = {
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "su": _longrope,  # what Phi-3 called it first
    }
    if kind not in readers:
        raise ModelError(
            f"config.json: rope scaling {kind!r} is not supported; 'default', {', '.join(map(repr, readers))} are"
        )
    return readers[kind](config, rotary_dim)


def _linear(config: Config, rotary_dim: int) -> RopeScaling:
    return LinearScaling(config.number("factor"))


def _dynamic(config: Config, rotary_dim: int) -> RopeScaling:
    if rotary_dim < 4:
        raise ModelError(f"config.json: dynamic rope scaling of {rotary_dim} dimensions is not defined")
    # The context a model was trained on defaults to its max_position_embeddings; for this kind it always is that.
    return DynamicScaling(
        config.number("factor", low=0.999, high=1e4), config.integer("max_position_embeddings", high=MOST_CONTEXT)
    )


def _llama3(config: Config, rotary_dim: int) -> RopeScaling:
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"config.json: rope's high_freq_factor={high} must be above its low_freq_factor={low}")
    return Llama3Scaling(config.number("factor"), low, high, _original(config))


def _yarn(config: Config, rotary_dim: int) -> RopeScaling:
    original = _original(config)
    factor = config.number("factor", config.integer("max_position_embeddings", high=MOST_CONTEXT) / original)
    if "attention_factor" in config:
        attention_factor = config.number("attention_factor")
    elif config.get("mscale") and config.get("mscale_all_dim"):
        attention_factor = YarnScaling.mscale(factor, config.number("mscale")) / YarnScaling.mscale(
            factor, config.number("mscale_all_dim")
        )
    else:
        attention_factor = YarnScaling.mscale(factor)
    fast, slow = config.number("beta_fast", 32.0), config.number("beta_slow", 1.0)
    if fast < slow:
        raise ModelError(f"config.json: rope's beta_fast={fast} must not be below its beta_slow={slow}")
    truncate = config.flag("truncate", True)
    return YarnScaling(factor, original, fast, slow, truncate, attention_factor=attention_factor)


def _longrope(config: Config, rotary_dim: int) -> RopeScaling:
    original = _original(config)
    factor = config.number("factor", config.integer("max_position_embeddings", high=MOST_CONTEXT) / original)
    return LongRopeScaling(
        config.numbers("short_factor", rotary_dim // 2),
        config.numbers("long_factor", rotary_dim // 2),
        original,
        attention_factor=config.number("attention_factor", LongRopeScaling.factor_of(factor, original)),
    )


def _original(config: Config) -> int:
    return config.integer("original_max_position_embeddings", low=2, high=MOST_CONTEXT)
