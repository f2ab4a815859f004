"""A step in the form of the native kernels: one row for each sequence, without groups or padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.groups import AttentionBatch
from engine.kernels.ragged import Attended, RaggedBatch

#: The same as kChunk in attention.h.
CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeBatch(AttentionBatch):
    """A step of one KV group, made once for all of its layers. The arrays are int32 and contiguous."""

    starts: Tensor
    """[sequences + 1]: the token rows of sequence i are starts[i] .. starts[i + 1]."""
    lengths: Tensor
    """[sequences]: the number of filled places in each table."""
    leads: Tensor
    """[sequences]: the offset of each table's beginning, in tokens from the sequence's first one, modulo CHUNK."""
    tables: Tensor
    """[rows, width]."""
    table_rows: Tensor
    """[sequences]: the row of each sequence in `tables`."""


def native_batch(batch: Attended) -> NativeBatch:
    if isinstance(batch, NativeBatch):
        return batch
    if isinstance(batch, RaggedBatch):
        # A ragged batch does not tell where a windowed table begins, so 0 is assumed.
        return NativeBatch(
            slots=batch.slots,
            groups=(),
            window=batch.window,
            starts=batch.query_starts,
            lengths=batch.kv_lens,
            leads=torch.zeros_like(batch.kv_lens),
            tables=batch.tables,
            table_rows=batch.table_rows,
        )
    groups = batch.groups
    counts = [group.query_len for group in groups for _ in group.kv_lens]
    lengths = [kv_len for group in groups for kv_len in group.kv_lens]
    leads = [before % CHUNK for group in groups for before in group.skipped or (0,) * len(group.kv_lens)]
    tables = np.zeros((len(lengths), max(group.block_tables.shape[1] for group in groups)), np.int32)
    first = 0
    for group in groups:
        sequences, width = group.block_tables.shape
        tables[first : first + sequences, :width] = group.block_tables.numpy()
        first += sequences
    return NativeBatch(
        slots=batch.slots,
        groups=groups,
        window=batch.window,
        starts=_int32(np.cumsum([0, *counts])),
        lengths=_int32(np.array(lengths)),
        leads=_int32(np.array(leads)),
        tables=torch.from_numpy(tables),
        table_rows=_int32(np.arange(len(lengths))),
    )


def _int32(numbers: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
