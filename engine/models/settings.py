"""A decoder's settings, read from config.json. A setting that would change the output is either served or refused.

Rotary embeddings are read from the section that Config.rope returns, each layer's attention window in the various
spellings of its family, and the experts of a mixture.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelError
from engine.kv import KvGroup
from engine.layers import (
    DividedScaling,
    DynamicScaling,
    ExpertShape,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)
from engine.text.config import MOST_CONTEXT, MOST_LAYERS, MOST_WIDTH, Config

#: The most experts of a layer: some ten times the largest known.
_MOST_EXPERTS = 4096
#: Maps config.json's activation names to the engine's.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True)
class DecoderSettings:
    """The settings of a decoder. The names are transformers', shortened."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    tied: bool
    activation: str
    """Either "silu" or "gelu_tanh"."""
    ropes: tuple[RopeSettings, ...]
    """One entry, or two: for layers with full attention, and for layers with a window."""
    windows: tuple[int | None, ...]
    """For each layer, the number of tokens that a query sees, its own included. None for all."""
    rope_of: tuple[int, ...]
    """For each layer, the index of its entry in `ropes`."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused: bool = False
    """Whether the checkpoint holds q, k, v as one matrix, and gate and up as one."""
    qk_norm: bool = False
    """Whether each head's query and key are normed before the rotation."""
    norm_offset: float = 0.0
    """Added to the checkpoint's norm weights."""
    query_scale: float | None = None
    """The factor of attention scores; None is head_dim ** -0.5."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of hidden_size."""
    experts: ExpertShape | None = None
    """The experts of layers that have some."""
    dense: frozenset[int] = frozenset()
    """The layers without experts, of a model that has experts."""
    bidirectional: bool = False
    """Whether a token also sees those after it, as far as the window in both directions. Queries and keys are normed
    then, and texts are computed whole: such a model makes vectors."""

    @classmethod
    def read(
        cls,
        config: Config,
        *,
        windows: tuple[int | None, ...] | None = None,
        ropes: tuple[Config, ...] | None = None,
        activation: str | None = None,
        **traits: Any,
    ) -> DecoderSettings:
        """Read the settings that families have in common. `traits`: other fields, which the family reads itself.

        `ropes`: sections that Config.rope returned. Raises ModelError naming the setting, its value and what is
        supported.
        """
        layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
        hidden_size = config.integer("hidden_size")
        heads, kv_heads, head_dim = _heads(config, hidden_size)
        context_length = config.context_length()
        windows = windows or (None,) * layers
        ropes = ropes or (config.rope(),)
        return cls(
            layers=layers,
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config.integer("vocab_size"),
            context_length=context_length,
            norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0),
            tied=config.flag("tie_word_embeddings"),
            activation=read_activation(config, "hidden_act", "silu") if activation is None else activation,
            ropes=tuple(RopeSettings.read(rope, head_dim) for rope in ropes),
            windows=tuple(
                # A window as long as the context has no effect.
                None if window is None or window >= context_length else window
                for window in windows
            ),
            rope_of=tuple(min(window is not None, len(ropes) - 1) for window in windows),
            **traits,
        )

    def of_layer(self, i: int) -> DecoderSettings:
        """The settings for layer `i`, which has no experts if it is dense."""
        return replace(self, experts=None) if i in self.dense else self

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The KV groups, one for each window. Full attention, if any, comes first."""
        counts = Counter(self.windows)
        return tuple(
            KvGroup(counts[window], self.kv_heads, self.head_dim, window)
            for window in sorted(counts, key=lambda window: (window is not None, window or 0))
        )

    @property
    def rope_switch(self) -> int | None:
        """The tokens of the longest sequence that uses the first set of rope frequencies. None if there is one set."""
        switches = {rope.scaling.switch for rope in self.ropes} - {None}
        if len(switches) > 1:
            raise ModelError(
                "config.json: rope scalings that switch at different lengths are not supported: "
                f"{', '.join(map(str, sorted(filter(None, switches))))}"
            )
        return next(iter(switches), None)


def _heads(config: Config, hidden_size: int) -> tuple[int, int, int]:
    """The number of query heads, that of key and value heads, and the size of each."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    if "head_dim" not in config and hidden_size % heads:
        raise ModelError(
            f"config.json: without head_dim, hidden_size={hidden_size} must be a multiple of "
            f"num_attention_heads={heads}"
        )
    return heads, kv_heads, config.integer("head_dim", hidden_size // heads, high=MOST_WIDTH // heads)


def read_activation(config: Config, name: str, default: str) -> str:
    """Read the activation from the setting `name`, whose name differs between families."""
    activation = config.text(name, default)
    if activation not in _ACTIVATIONS:
        raise config.wrong(name, f"is not supported; {', '.join(map(repr, _ACTIVATIONS))} are")
    return _ACTIVATIONS[activation]


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
                f"config.json: head_dim={head_dim} and partial_rotary_factor={part:g} give {rotary_dim} rotary "
                f"dimensions; it must be an even number of at least 2"
            )
        theta = config.number("rope_theta", 10000.0, low=1.0)
        return cls(rotary_dim, theta, _scaling(config, rotary_dim))


def _scaling(config: Config, rotary_dim: int) -> RopeScaling:
    kind = config.text("rope_type")
    if kind == "default":
        return RopeScaling()
    readers = {
        "linear": _linear,
        "divisors": _divisors,
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


def _divisors(config: Config, rotary_dim: int) -> RopeScaling:
    return DividedScaling(config.numbers("divisors", rotary_dim // 2))


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


def uniform_windows(config: Config) -> tuple[int | None, ...]:
    """The same window for all layers: config.json's sliding_window, or none if that is null."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    window = _window(config) if "sliding_window" in config else None
    kind = "full_attention" if window is None else "sliding_attention"
    if config.get("layer_types") is not None and set(_layer_types(config, layers)) != {kind}:
        raise config.wrong("layer_types", f"does not go with sliding_window={window}: all layers must be {kind!r}")
    return (window,) * layers


def mixed_windows(config: Config, default: list[bool]) -> tuple[int | None, ...]:
    """Windows for the layers that slide according to `layer_types`, or else according to `default`."""
    if config.get("layer_types") is not None:
        default = [kind == "sliding_attention" for kind in _layer_types(config, len(default))]
    if not any(default):
        return (None,) * len(default)
    window = _window(config)
    return tuple(window if slides else None for slides in default)


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen's windows: with use_sliding_window, the layers from max_window_layers on have one."""
    layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    slides = config.flag("use_sliding_window") and "sliding_window" in config
    first = config.integer("max_window_layers", low=0)
    if not slides and config.get("layer_types") is not None and "sliding_attention" in _layer_types(config, layers):
        raise config.wrong("layer_types", "has sliding layers although use_sliding_window is off")
    return mixed_windows(config, [slides and i >= first for i in range(layers)])


def _window(config: Config) -> int:
    return config.integer("sliding_window", high=MOST_CONTEXT)


def _layer_types(config: Config, layers: int) -> list[str]:
    kinds = config.get("layer_types")
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in supported for kind in kinds):
        raise config.wrong("layer_types", f"must be a list of {layers} of {', '.join(map(repr, supported))}")
    return kinds


def read_experts(config: Config, width: int, *, count: int, normed: bool) -> ExpertShape:
    """Read the shape of a layer's experts. `count`: the architecture's default. Raises ModelError."""
    # transformers 5 writes num_local_experts for all families.
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts = config.integer(name, count, high=_MOST_EXPERTS)
    if "num_experts" in config and config.get("num_experts") != experts:
        raise config.wrong("num_experts", f"does not go with {name}={experts}")
    of_row = config.integer("num_experts_per_tok", high=MOST_WIDTH)
    if of_row > experts:
        raise config.wrong("num_experts_per_tok", f"is more than the {experts} experts of {name}")
    return ExpertShape(experts, of_row, width, normed)
