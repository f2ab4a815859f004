"""The rows of a step that adapters change, sorted by adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.adapter import Adapter, LowRankEmbedding
from engine.kernels import ExpertChanges
from engine.kernels.upload import upload
from engine.layers import Linear, StepAdapters
from engine.plan import ScheduledSeq


class AdapterRows:
    """The rows of a batch that belong to each adapter. Each adapter's rows are computed together, in two small products
    for each product of the model."""

    def __init__(self, adapters: Sequence[Adapter], owners: NDArray[np.int64], device: torch.device) -> None:
        """`owners`: [rows], the index in `adapters` of each row's, -1 for none."""
        self.adapters, self.owners, self._device = adapters, owners, device

    @cached_property
    def groups(self) -> list[tuple[Adapter, Tensor | None]]:
        """Each adapter with its rows, int64; None: all rows."""
        adapters, owners = self.adapters, self.owners
        counts = np.bincount(owners[owners >= 0], minlength=len(adapters))
        present = [i for i, count in enumerate(counts) if count]
        if len(present) == 1 and counts[present[0]] == len(owners):
            return [(adapters[present[0]], None)]
        # The padding rows of a device's batch come after the rows here and belong to no adapter.
        rows = upload([np.flatnonzero(owners == i) for i in present], self._device) if present else []
        return [(adapters[i], of_adapter) for i, of_adapter in zip(present, rows, strict=True)]

    def select(self, rows: NDArray[np.int64] | slice) -> AdapterRows:
        """Some of the rows, in the order of `rows`."""
        return AdapterRows(self.adapters, self.owners[rows], self._device)

    def add(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """Add the adapters' changes to `out`, [rows, outputs], the result of `linear` for `x`, [rows, inputs]."""
        for adapter, rows in self.groups:
            change = adapter.products.get(linear)
            if change is not None:
                change.add(x, out, rows)

    def experts(self, gate_ups: Sequence[Linear], downs: Sequence[Linear]) -> list[ExpertChanges]:
        """The adapters' changes of a mixture's experts, whose products are `gate_ups` and `downs`."""
        changes = []
        for adapter, rows in self.groups:
            if adapter.changes_experts:
                both = [[adapter.products.get(linear) for linear in linears] for linears in (gate_ups, downs)]
                if any(change is not None for of_product in both for change in of_product):
                    changes.append(ExpertChanges(rows, *both))
        return changes

    def embed(self, tokens: Tensor, out: Tensor) -> None:
        """Change `out`, [rows, width], the embedding's rows of `tokens`, before they are scaled."""
        for adapter, rows in self.groups:
            if adapter.embedding is None:
                continue
            every = slice(None) if rows is None else rows
            if isinstance(adapter.embedding, LowRankEmbedding):
                out[every] += adapter.embedding.rows(tokens[every]).to(out.dtype)
            else:
                out[every] = F.embedding(tokens[every], adapter.embedding).to(out.dtype)

    @property
    def changes_head(self) -> bool:
        """Whether an adapter changes the product that makes logits."""
        return any(adapter.head is not None or adapter.head_change is not None for adapter, _ in self.groups)

    def logits(self, head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """The logits that `head`, the model's, or the adapters' own heads make of `hidden`, [rows, width]."""
        logits = head(hidden)
        for adapter, rows in self.groups:
            if adapter.head_change is not None:
                adapter.head_change.add(hidden, logits, rows)
            elif adapter.head is not None:
                every = slice(None) if rows is None else rows
                logits[every] = adapter.head(hidden[every])
        return logits


def step_adapters(
    rows: Sequence[ScheduledSeq], output_rows: NDArray[np.int64], device: torch.device
) -> StepAdapters | None:
    """The adapters of a step, None if there is none. `rows`: the plan's in the order of the batch. `output_rows`: see
    StepBatch."""
    adapters, owners = owners_of(rows)
    if not adapters:
        return None
    tokens = AdapterRows(adapters, owners.repeat([row.count for row in rows]), device)
    return StepAdapters(tokens, tokens.select(output_rows))


def owners_of(rows: Sequence[ScheduledSeq]) -> tuple[tuple[Adapter, ...], NDArray[np.int64]]:
    """The adapters of a plan's rows, and the index of each row's among them, -1 for none."""
    adapters: dict[Adapter, int] = {}
    owners = []
    for row in rows:
        adapter = row.seq.adapter
        assert adapter is None or isinstance(adapter, Adapter)
        owners.append(-1 if adapter is None else adapters.setdefault(adapter, len(adapters)))
    return tuple(adapters), np.array(owners, np.int64)
