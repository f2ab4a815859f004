"""Executes plans of texts on one device: a step is one ragged batch, in order of length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import NOT_FINITE
from engine.plan import Sampled, ScheduledSeq, StepPlan
from engine.request import Pooling
from engine.sequence import Sequence as Text


class Rows(Protocol):
    """A model that makes rows of texts."""

    device: torch.device

    def forward(self, tokens: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """See Encoder.forward."""


#: Makes a text's result of its rows.
Finish = Callable[[Tensor, Pooling], Tensor]


class PoolingRunner:
    """An Executor (engine.execution.pipeline). Used by one thread."""

    def __init__(self, model: Rows, finish: Callable[[Tensor, Sequence[int], Sequence[Pooling]], list[Tensor]]) -> None:
        """`finish`: makes each text's result, of the rows of all, their lengths and what is asked of each."""
        self._model = model
        self._finish = finish

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> list[Sampled]:
        """Execute a plan at once."""
        order = sorted(range(len(plan.rows)), key=lambda i: plan.rows[i].count)
        rows = [plan.rows[i] for i in order]
        device, lengths = self._model.device, [row.count for row in rows]
        tokens = torch.tensor([token for row in rows for token in row.seq.tokens], device=device)
        types = torch.cat([_types(row) for row in rows]).to(device)
        hidden = self._model.forward(tokens, types, lengths)
        results = self._finish(hidden, lengths, [_pooling(row) for row in rows])
        sampled = [Sampled(-1)] * len(rows)
        for i, result in zip(order, results, strict=True):
            values = result.float().tolist()
            finite = all(value - value == 0 for value in values)
            sampled[i] = Sampled(-1, row=values) if finite else Sampled(-1, error=NOT_FINITE)
        return sampled

    def collect(self, launched: list[Sampled]) -> list[Sampled]:
        """Return a launched plan's results."""
        return launched

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Nothing: there are no KV blocks."""

    def needs_token(self, sequence: Text) -> bool:
        """Always False: nothing is sampled."""
        return False

    def forget(self) -> None:
        """Nothing: no state is kept between steps."""


def _pooling(row: ScheduledSeq) -> Pooling:
    pooling = row.seq.request.pooling
    assert pooling is not None
    return pooling


def _types(row: ScheduledSeq) -> Tensor:
    """The token types of a text: 1 for the second text of a pair."""
    types = torch.zeros(row.count, dtype=torch.int64)
    seconds = _pooling(row).seconds
    if seconds:
        types[seconds[row.seq.choice] :] = 1
    return types
