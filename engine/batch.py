"""A step plan as tensors: permanent rows of block tables, and the order in which attention likes its sequences."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import AttentionBatch, AttentionGroup, Kernels, visibility
from engine.plan import ScheduledSeq, StepPlan
from engine.request import Sequence
from engine.upload import upload


@dataclass(frozen=True, slots=True)
class StepBatch:
    tokens: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens], from each prompt's first token."""
    long: Tensor | None
    """bool [tokens], whose sequence is longer than the model's rope_switch; None where it has none."""
    attention: tuple[AttentionBatch, ...]
    """One for each KV group."""
    wanted: Tensor
    """int64: token rows whose logits are wanted: of the sampling rows, in the plan's order; then of the prompts that
    are scored, in the plan's order."""
    entered: Tensor | None
    """int64: blocks that this step begins to fill but does not fill up, to be zeroed before the forward pass.

    Attention pads with the rest of a sequence's last block, and masks it; but 0 x NaN is NaN, so what an earlier
    owner whose numbers overflowed left there would harm the next.
    """


class BatchBuilder:
    """Keeps row `slot` of a table for the running sequence with that slot; only what changed is written again."""

    def __init__(
        self,
        slots: int,
        blocks_per_sequence: int,
        block_size: int,
        zero_block: int,
        kernels: Kernels,
        device: torch.device,
        *,
        windows: Sequence_[int | None] = (None,),
        rope_switch: int | None = None,
    ) -> None:
        self._windows = windows
        self._rope_switch = rope_switch
        self._block_size = block_size
        self._zero_block = zero_block
        self._kernels = kernels
        self._device = device
        self._tables = np.full((slots, blocks_per_sequence), zero_block, np.int64)
        self._written: list[list[int]] = [[] for _ in range(slots)]

    def build(self, plan: StepPlan) -> StepBatch:
        order = sorted(range(len(plan.rows)), key=lambda i: _shape(plan.rows[i]))
        rows = [plan.rows[i] for i in order]
        for row in rows:
            self._write_table(row.seq)
        tokens: list[int] = []
        for row in rows:
            tokens += row.seq.tokens[row.start : row.start + row.count]
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        slots = np.fromiter((row.seq.slot for row in rows), np.int64, len(rows))
        ends = counts.cumsum()
        positions = np.arange(len(tokens)) + (starts - (ends - counts)).repeat(counts)
        blocks = self._tables[slots.repeat(counts), positions // self._block_size]
        last_row = np.empty(len(rows), np.int64)
        last_row[order] = ends - 1
        wanted = last_row[[i for i, row in enumerate(plan.rows) if row.samples]]
        spans = [
            np.arange(span.start, span.stop) + (last_row[i] + 1 - row.count - row.start)
            for i, row in enumerate(plan.rows)
            if row.seq.scores is not None and (span := row.wanted())
        ]
        if spans:
            wanted = np.concatenate((wanted, *spans))
        bounds = self._group(rows)
        groups = self._tables_of(bounds, slots, starts + counts)
        entered = self._entered(slots, starts, starts + counts)
        totals = np.fromiter((len(row.seq.tokens) for row in rows), np.int64, len(rows))
        long = (totals > (self._rope_switch or 0)).repeat(counts)
        sent = upload(
            [
                np.array(tokens, np.int64),
                positions,
                blocks * self._block_size + positions % self._block_size,
                wanted,
                entered,
                long,
                *(array for pair in groups for array in pair),
            ],
            self._device,
        )
        return StepBatch(
            tokens=sent[0],
            positions=sent[1],
            long=None if self._rope_switch is None else sent[5],
            attention=tuple(
                AttentionBatch(sent[2], self._attention_groups(rows, bounds, sent[6:], window), window)
                for window in self._windows
            ),
            wanted=sent[3],
            entered=sent[4] if len(entered) else None,
        )

    def _write_table(self, sequence: Sequence) -> None:
        held, blocks = self._written[sequence.slot], sequence.block_table
        if held == blocks:
            return
        row = self._tables[sequence.slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : len(held)] = self._zero_block
        self._written[sequence.slot] = blocks.copy()

    def _group(self, rows: list[ScheduledSeq]) -> list[tuple[int, int]]:
        """(first, end) of runs of `rows`, which are sorted, that share one padded attention batch."""
        ratio, slack = self._kernels.padding
        bounds: list[tuple[int, int]] = []
        first = 0
        for i in range(1, len(rows) + 1):
            if i < len(rows):
                count, shortest = _shape(rows[first])
                if rows[i].count == count and sum(_shape(rows[i])[1:]) <= ratio * shortest + slack:
                    continue
            bounds.append((first, i))
            first = i
        return bounds

    def _tables_of(
        self, bounds: list[tuple[int, int]], slots: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """For each group the block tables [sequences, blocks of the longest] and the lengths [sequences]."""
        found = []
        for first, end in bounds:
            lens = ends[first:end]
            blocks = -(-int(lens.max()) // self._block_size)
            found.append((self._tables[slots[first:end], :blocks], lens))
        return found

    def _attention_groups(
        self, rows: list[ScheduledSeq], bounds: list[tuple[int, int]], sent: list[Tensor], window: int | None
    ) -> tuple[AttentionGroup, ...]:
        groups = []
        token_row = 0
        for i, (first, end) in enumerate(bounds):
            tables, lens = sent[2 * i], sent[2 * i + 1]
            query_len = rows[first].count
            kv_lens = tuple(row.start + row.count for row in rows[first:end])
            fresh = all(kv_len == query_len for kv_len in kv_lens) and (window is None or query_len <= window)
            mask = None if fresh else visibility(lens, query_len, tables.shape[1] * self._block_size, window)
            groups.append(AttentionGroup(token_row, query_len, kv_lens, tables, mask))
            token_row += (end - first) * query_len
        return tuple(groups)

    def _entered(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        last = (ends - 1) // self._block_size
        first_entered = (last * self._block_size >= starts) & (ends % self._block_size != 0)
        blocks: NDArray[np.int64] = self._tables[slots[first_entered], last[first_entered]]
        return blocks


def _shape(row: ScheduledSeq) -> tuple[int, int]:
    return row.count, row.start + row.count
