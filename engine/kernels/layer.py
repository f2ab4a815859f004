"""The parts of a decoder layer, for kernel sets that run all layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.kernels.ragged import RaggedBatch

#: The product with a prepared weight: [rows, inputs] -> [rows, outputs].
PreparedLinear = Callable[[Tensor], Tensor]


class DenseProduct:
    """A PreparedLinear whose weight other operations may read."""

    def __init__(self, weight: Tensor, bias: Tensor | None, run: PreparedLinear) -> None:
        self.weight, self.bias, self._run = weight, bias, run

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x)


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """A mixture of experts as layers/experts.py runs it."""

    router: PreparedLinear
    """Makes the logits of experts, [rows, experts]."""
    gate_ups: tuple[PreparedLinear, ...]
    """The gate and up products of each expert, as one."""
    downs: tuple[PreparedLinear, ...]
    chosen: int
    """The experts of a row."""
    normed: bool
    """Whether the shares of a row's experts are divided by their sum."""
    activation: str
    """Either "silu" or "gelu_tanh"."""


#: Runs the experts, the router's product aside. Arguments: x [rows, width]; the router's logits [rows, experts].
#: Returns [rows, width].
PreparedExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer as models/decoder.py runs it: norm, attention, sum, norm, gated feed-forward, sum. Norm weights are in
    the form for `rms_norm`."""

    group: int
    """Its KV group."""
    cache_index: int
    """Its index in that group's cache."""
    rope: int
    """The index of its rotation among the step's."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    eps: float
    input_norm: Tensor
    qkv: PreparedLinear
    head_norms: tuple[Tensor, Tensor] | None
    """The norm weights of queries and keys, applied before the rotation."""
    output: PreparedLinear
    attended_norm: Tensor | None
    """The norm weight for the output of attention, before it is added."""
    middle_norm: Tensor
    gate_up: PreparedLinear | None
    """None, as is `down`, for a layer with experts."""
    activation: str
    """Either "silu" or "gelu_tanh"."""
    down: PreparedLinear | None
    fed_norm: Tensor | None
    """The norm weight for the output of the feed-forward block, before it is added."""
    experts: ExpertParts | None = None


#: Runs all layers. Arguments: residual [tokens, width], which may be overwritten; (cos, sin) of each rope; the
#: attention batch and the cache of each KV group; the wanted tokens, int64 [rows]. Returns their last hidden states
#: [rows, width], normed.
PreparedLayers = Callable[
    [Tensor, Sequence[tuple[Tensor, Tensor]], Sequence[RaggedBatch], Sequence[Tensor], Tensor], Tensor
]

#: Receives (kernel class, as breakdown.py names it; the seconds that a call spent in it).
ReportTime = Callable[[str, float], None]
