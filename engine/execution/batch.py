"""Builds the tensors of a step plan, with the sequences grouped as attention needs them."""

from __future__ import annotations

from collections.abc import Sequence as Each
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.execution.block_rows import BlockRows, Ints, runs
from engine.kernels import AttentionBatch, AttentionGroup, Kernels, visibility
from engine.kernels.upload import upload
from engine.kv import KvSpace
from engine.plan import ScheduledSeq, StepPlan


@dataclass(frozen=True, slots=True)
class StepBatch:
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens], counted from each prompt's first token."""
    long: Tensor | None
    """bool [tokens]: whether the token's sequence is longer than the model's rope_switch. None if the model has
    none."""
    attention: tuple[AttentionBatch, ...]
    """One batch for each KV group."""
    wanted: Tensor
    """int64: the token rows whose logits are wanted. First, for the sampling rows in the plan's order, the last token
    and each draft token. Then the scored positions of prompts, in the plan's order."""
    entered: tuple[Tensor | None, ...]
    """int64, for each KV group: the blocks that this step begins to fill but does not fill up. They are zeroed before
    the forward pass.

    Attention reads the rest of a sequence's last block as masked padding. But 0 x NaN is NaN, so NaNs that an earlier
    sequence left there would harm this one.
    """


class BatchBuilder:
    def __init__(
        self,
        spaces: Each[KvSpace],
        slots: int,
        block_size: int,
        kernels: Kernels,
        device: torch.device,
        *,
        rope_switch: int | None = None,
    ) -> None:
        """`spaces`: the memory of each KV group. The block after a group's last one is always zero."""
        self._groups = [BlockRows(space, slots, block_size) for space in spaces]
        self._block_size = block_size
        self._kernels = kernels
        self._device = device
        self._rope_switch = rope_switch

    def build(self, plan: StepPlan) -> StepBatch:
        order = sorted(range(len(plan.rows)), key=lambda i: _shape(plan.rows[i]))
        rows = [plan.rows[i] for i in order]
        tokens: list[int] = []
        for row in rows:
            tokens += row.computed()
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        slots = np.fromiter((row.seq.slot for row in rows), np.int64, len(rows))
        ends: Ints = counts.cumsum()
        positions: Ints = np.arange(len(tokens)) + (starts - (ends - counts)).repeat(counts)
        last_row = np.empty(len(rows), np.int64)
        last_row[order] = ends - 1
        arrays: list[NDArray[Any]] = [np.array(tokens, np.int64), positions, self._wanted(plan, last_row)]
        if self._rope_switch is not None:
            totals = np.fromiter((len(row.seq.tokens) for row in rows), np.int64, len(rows))
            arrays.append((totals > self._rope_switch).repeat(counts))
        shared = len(arrays)
        parts = []
        for i, group in enumerate(self._groups):
            for row in rows:
                group.write(row.seq.slot, row.seq.tables[i])
            skipped = group.skipped(slots)
            lengths = starts + counts - skipped
            bounds = runs(rows, lengths.tolist(), *self._kernels.padding)
            begin = len(arrays)
            arrays.append(group.places(slots.repeat(counts), positions - skipped.repeat(counts)))
            arrays.append(group.entered(slots, starts - skipped, lengths))
            for first, end in bounds:
                arrays += [group.tables(slots[first:end], lengths[first:end]), lengths[first:end]]
            parts.append((group, bounds, lengths.tolist(), skipped.tolist(), begin))
        sent = upload(arrays, self._device)
        return StepBatch(
            tokens=sent[0],
            positions=sent[1],
            wanted=sent[2],
            long=sent[3] if shared > 3 else None,
            attention=tuple(
                self._kernels.arrange(
                    AttentionBatch(
                        sent[begin],
                        self._attention(rows, bounds, lengths, skipped, sent[begin + 2 :], group.window),
                        group.window,
                    ),
                    self._block_size,
                    group.zero_block,
                )
                for group, bounds, lengths, skipped, begin in parts
            ),
            entered=tuple(sent[part[-1] + 1] if len(arrays[part[-1] + 1]) else None for part in parts),
        )

    @staticmethod
    def _wanted(plan: StepPlan, last_row: Ints) -> Ints:
        sampling = [i for i, row in enumerate(plan.rows) if row.samples]
        wanted: Ints = last_row[sampling]
        if any(row.draft for row in plan.rows):
            drafted = np.fromiter((len(plan.rows[i].draft) for i in sampling), np.int64, len(sampling))
            ends: Ints = (drafted + 1).cumsum()
            wanted = np.arange(ends[-1]) + (wanted + 1 - ends).repeat(drafted + 1)
        spans = [
            np.arange(span.start, span.stop) + (last_row[i] + 1 - row.count - row.start)
            for i, row in enumerate(plan.rows)
            if row.seq.scores is not None and (span := row.wanted())
        ]
        return np.concatenate((wanted, *spans)) if spans else wanted

    def _attention(
        self,
        rows: list[ScheduledSeq],
        bounds: list[tuple[int, int]],
        lengths: list[int],
        skipped: list[int],
        sent: list[Tensor],
        window: int | None,
    ) -> tuple[AttentionGroup, ...]:
        """The attention groups of one KV group. `sent` has the tables and lengths of each of `bounds`, in turn."""
        groups = []
        token_row = 0
        for i, (first, end) in enumerate(bounds):
            tables, lens = sent[2 * i], sent[2 * i + 1]
            query_len = rows[first].count
            kv_lens = tuple(lengths[first:end])
            fresh = all(kv_len == query_len for kv_len in kv_lens) and (window is None or query_len <= window)
            mask = None
            if self._kernels.masked and not fresh:
                mask = visibility(lens, query_len, tables.shape[1] * self._block_size, window)
            groups.append(AttentionGroup(token_row, query_len, kv_lens, tables, mask, tuple(skipped[first:end])))
            token_row += (end - first) * query_len
        return tuple(groups)


def _shape(row: ScheduledSeq) -> tuple[int, int]:
    return row.count, row.start + row.count
