"""The parts of a decoder layer, for kernel sets that run all layers in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class LowRankChange(Protocol):
    """An adapter's change of one product: scale * B A x, for each part of the product that is adapted."""

    def add(self, x: Tensor, out: Tensor, rows: Tensor | None) -> None:
        """Add the change to `out`, [tokens, outputs], the results of a product for `x`, [tokens, inputs]. `rows`:
        int64, the tokens to change; None is all."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A LowRankChange of prepared products."""

    down: PreparedLinear
    """All parts' A, one below another: [rows, inputs] -> [rows, ranks of all parts]."""
    ups: tuple[tuple[slice, slice, PreparedLinear], ...]
    """For each part: its outputs, its ranks, and scale * B: [rows, rank] -> [rows, outputs of the part]."""

    def add(self, x: Tensor, out: Tensor, rows: Tensor | None) -> None:
        """See LowRankChange."""
        inner = self.down(x if rows is None else x[rows])
        for outputs, ranks, up in self.ups:
            change = up(inner[:, ranks])
            if rows is None:
                out[:, outputs] += change
            else:
                out[:, outputs].index_add_(0, rows, change)


class PreparedAdapter(Protocol):
    """An adapter's products, for kernel sets that run all layers in one call."""

    def changes(self) -> Mapping[PreparedLinear, LowRankChange]:
        """The changes by the products that they change."""


#: The adapters of a batch's rows, each with its rows, int64; None: all rows.
AdapterGroups = Sequence[tuple[PreparedAdapter, Tensor | None]]


class PreparedStepAdapters(Protocol):
    """The adapters of a step's rows."""

    @property
    def groups(self) -> tuple[AdapterGroups, AdapterGroups]:
        """Those of all tokens, and those of the output rows."""


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


@dataclass(frozen=True, slots=True)
class ExpertChanges:
    """An adapter's changes of a mixture's experts, for its own rows. None: it does not change that product."""

    rows: Tensor | None
    """The rows to change, int64; None is all."""
    gate_ups: Sequence[LowRankChange | None]
    downs: Sequence[LowRankChange | None]


class PreparedExperts(Protocol):
    """Runs the experts, the router's product aside."""

    def __call__(self, x: Tensor, logits: Tensor, changes: Sequence[ExpertChanges] = ()) -> Tensor:
        """`x`: [rows, width]. `logits`: the router's, [rows, experts]. Returns [rows, width]."""


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


class PreparedLayers(Protocol):
    """Runs all layers."""

    def __call__(
        self,
        residual: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attention: Sequence[RaggedBatch],
        caches: Sequence[Tensor],
        output_rows: Tensor,
        adapters: PreparedStepAdapters | None = None,
        partial: bool = False,
    ) -> Tensor:
        """`residual`: [tokens, width], which may be overwritten; `partial`: it is to be summed over the ranks, if there
        are several. `rotations`: (cos, sin) of each rope. `attention`,
        `caches`: one for each KV group. `output_rows`: the wanted tokens, int64 [rows]. Returns their last hidden
        states [rows, width], normed; without a norm, what enters the next stage, [tokens, width]."""


#: Receives (kernel class, as breakdown.py names it; the seconds that a call spent in it).
ReportTime = Callable[[str, float], None]
