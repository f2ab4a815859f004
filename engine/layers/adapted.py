"""The interface of the rows that LoRA adapters change (engine/adapters/rows.py) to the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import AdapterGroups, ExpertChanges

if TYPE_CHECKING:
    from engine.layers.linear import Linear


class AdaptedRows(Protocol):
    """The rows of a batch, with the adapter of each."""

    def select(self, rows: NDArray[np.int64] | slice) -> AdaptedRows:
        """Some of the rows, in the order of `rows`."""

    def add(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """Add the adapters' changes to `out`, [rows, outputs], the result of `linear` for `x`, [rows, inputs]."""

    def experts(self, gate_ups: Sequence[Linear], downs: Sequence[Linear]) -> Sequence[ExpertChanges]:
        """The adapters' changes of a mixture's experts, whose products are `gate_ups` and `downs`."""

    def embed(self, tokens: Tensor, out: Tensor) -> None:
        """Change `out`, [rows, width], the embedding's rows of `tokens`, before they are scaled."""

    @property
    def groups(self) -> AdapterGroups:
        """The adapters with their rows."""

    @property
    def changes_head(self) -> bool:
        """Whether an adapter changes the product that makes logits."""

    def logits(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """The logits that `head`, the model's, or the adapters' own heads make of `hidden`, [rows, width]."""


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step's rows."""

    tokens: AdaptedRows
    """Those of all tokens."""
    outputs: AdaptedRows
    """Those of the output rows."""

    @property
    def groups(self) -> tuple[AdapterGroups, AdapterGroups]:
        """Both, for kernel sets that run all layers in one call."""
        return self.tokens.groups, self.outputs.groups
