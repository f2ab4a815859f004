"""A decoder's settings, read from config.json. A setting that would change the output is either served or refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelError
from engine.kv import KvGroup
from engine.layers import ExpertShape
from engine.models.rotary import RopeSettings
from engine.text.config import MOST_LAYERS, MOST_WIDTH, Config

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
