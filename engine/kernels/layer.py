"""What a decoder layer is made of, for sets that run all layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.ragged import Attended

#: A weight made ready for its device: [rows, inputs] -> [rows, outputs].
PreparedLinear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer as models/decoder.py runs it: norm, attention, sum, norm, gated feed-forward, sum. Norm weights are as
    `rms_norm` takes them."""

    group: int
    """Its KV group."""
    place: int
    """In that group's cache."""
    rope: int
    """Which of a step's rotations."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    eps: float
    input_norm: Tensor
    qkv: PreparedLinear
    head_norms: tuple[Tensor, Tensor] | None
    """Of queries and keys, before they turn."""
    output: PreparedLinear
    attended_norm: Tensor | None
    """Of what attention gives, before it is added."""
    middle_norm: Tensor
    gate_up: PreparedLinear
    activation: str
    """"silu" or "gelu_tanh"."""
    down: PreparedLinear
    fed_norm: Tensor | None
    """Of what the feed-forward block gives, before it is added."""


#: (residual [tokens, width], which may be overwritten; (cos, sin) of each rope; what attention sees and the cache, of
#: each KV group; which tokens are wanted, int64 [rows]) -> their last hidden states [rows, width], normed.
PreparedLayers = Callable[
    [Tensor, Sequence[tuple[Tensor, Tensor]], Sequence[Attended], Sequence[Tensor], Tensor], Tensor
]

#: (kernel class, as breakdown.py names it; the seconds that a call spent in it)
Told = Callable[[str, float], None]
