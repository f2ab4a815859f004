"""The state of running sequences that stays on the device between steps: block tables and last sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence as Each
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineError, ErrorText
from engine.kv import KvSpace, Table
from engine.plan import ScheduledSeq

Ints = NDArray[np.int32]

#: Tables of up to this many numbers (256 MiB) have their final width from the beginning. Larger ones grow on demand.
_MOST_AT_ONCE = 1 << 26
_NARROWEST = 64
#: The most table entries, because kernels count them in int32.
_MAX_ENTRIES = (1 << 31) - 1
_NONE = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Group:
    window: int | None
    max_width: int
    """The number of blocks of the longest possible table."""
    width: int
    start: int = 0
    """The offset of the group's tables in the state, row after row. With a window the rows' firsts follow them."""
    tables: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """The host's copy of the device's tables; -1 for unknown entries."""
    firsts: Ints = field(default_factory=lambda: _NONE)


class DeviceRows:
    """The block tables of running sequences on the device. Row `slot` belongs to the running sequence with that slot.

    All tables are one tensor, `state`, so that all changes of a step are one list of (index, value). Data that a step
    sends anyway for each of its rows (computed tokens, whether it is long) is not kept here.
    """

    def __init__(
        self, spaces: Each[KvSpace], *, slots: int, block_size: int, length: int, device: torch.device
    ) -> None:
        """`length`: the tokens of the longest sequence. Raises EngineError if the tables have more entries than an
        int32 can count."""
        self.slots = slots
        self.block_size = block_size
        self.version = 0
        """Changes when `state` becomes another tensor, which makes recorded graphs invalid."""
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """The token that each row sampled last, int64 [slots]."""
        self._device = device
        # No block is in a table twice, so no table is longer than its pool.
        table_lengths = [max(1, min(-(-length // block_size), space.num_blocks)) for space in spaces]
        entries = slots * (sum(table_lengths) + len(table_lengths))
        if entries > _MAX_ENTRIES:
            raise EngineError(
                ErrorText.of(
                    "the block tables of {} sequences of {} tokens in blocks of {} have {} entries, more than {}; "
                    "raise {block_size}, or lower {max_num_seqs} or {max_model_len}",
                    slots,
                    length,
                    block_size,
                    entries,
                    _MAX_ENTRIES,
                )
            )
        whole = entries <= _MOST_AT_ONCE
        self._groups = [
            _Group(space.window, length_limit, length_limit if whole else min(length_limit, _NARROWEST))
            for space, length_limit in zip(spaces, table_lengths, strict=True)
        ]
        self._grows = not whole
        self._entered: list[list[Table | None]] = [[None] * slots for _ in spaces]
        self._counts: list[list[int]] = [[0] * slots for _ in spaces]
        self._lay_out()

    def _lay_out(self) -> None:
        total = 0
        for group in self._groups:
            group.start = total
            group.tables = np.empty((self.slots, group.width), np.int32)
            group.firsts = np.empty(self.slots if group.window is not None else 0, np.int32)
            total += group.tables.size + group.firsts.size
        self.state = torch.zeros(total, dtype=torch.int32, device=self._device)
        places = [
            (group.start, group.width, group.start + group.tables.size if group.firsts.size else -1)
            for group in self._groups
        ]
        #: int64 [groups, 3]: the offset of the group's tables in the state, their width, the offset of its firsts or
        #: -1.
        self.layout = torch.tensor(places, dtype=torch.int64, device=self._device)
        self.forget()

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self._groups)

    def tables(self, group: int) -> Tensor:
        """The tables of one KV group, int32 [slots, width], from the first block that each sequence still holds."""
        group_rows = self._groups[group]
        end = group_rows.start + group_rows.tables.size
        return self.state[group_rows.start : end].view(self.slots, group_rows.width)

    def firsts(self, group: int) -> Tensor | None:
        """The index of each table's first block in its sequence, int32 [slots]. None for a group without a window."""
        group_rows = self._groups[group]
        if group_rows.window is None:
            return None
        start = group_rows.start + group_rows.tables.size
        return self.state[start : start + self.slots]

    def differences(self, rows: Each[ScheduledSeq]) -> tuple[Ints, Ints]:
        """The changes, as (indexes, values), that bring `state` up to date for these rows, given all earlier changes.

        If earlier changes did not arrive, call `forget` first. A table only ever grows at its end, or loses blocks at
        its beginning with a new `first`. A new table is a new object (engine.kv.Table).
        """
        if self._grows:
            self._grow(rows)
        indexes: list[Ints] = []
        values: list[Ints] = []
        for i, group in enumerate(self._groups):
            tables, counts, firsts = self._entered[i], self._counts[i], group.firsts
            windowed = group.window is not None
            for row in rows:
                slot, table = row.seq.slot, row.seq.tables[i]
                written = counts[slot]
                if table is not tables[slot] or (windowed and firsts[slot] != table.first):
                    tables[slot] = table
                    written = 0
                    if windowed and firsts[slot] != table.first:
                        firsts[slot] = table.first
                        indexes.append(np.array([group.start + group.tables.size + slot], np.int32))
                        values.append(np.array([table.first], np.int32))
                elif len(table.blocks) == written:
                    continue
                fresh = np.array(table.blocks[written:], np.int32)
                mirror = group.tables[slot, written : written + len(fresh)]
                changed = (mirror != fresh).nonzero()[0].astype(np.int32)
                indexes.append(changed + np.int32(group.start + slot * group.width + written))
                values.append(fresh[changed])
                mirror[:] = fresh
                counts[slot] = len(table.blocks)
        if not indexes:
            return _NONE, _NONE
        return np.concatenate(indexes), np.concatenate(values)

    @property
    def widths(self) -> tuple[int, ...]:
        """The blocks that each group's tables have room for."""
        return tuple(group.width for group in self._groups)

    def widen(self, widths: Each[int]) -> None:
        """Give the tables these widths; all rows are sent again then."""
        if tuple(widths) == self.widths:
            return
        for group, width in zip(self._groups, widths, strict=True):
            group.width = width
        self._lay_out()
        self.version += 1

    def forget(self) -> None:
        """Assume nothing about the device's contents: each row is sent whole again with its next step."""
        for i, group in enumerate(self._groups):
            group.tables.fill(-1)
            group.firsts.fill(-1)
            self._entered[i] = [None] * self.slots

    def _grow(self, rows: Each[ScheduledSeq]) -> None:
        """Widen tables that one of `rows` has outgrown, at least by a factor of two."""
        widths = []
        for i, group in enumerate(self._groups):
            needed = max((len(row.seq.tables[i].blocks) for row in rows), default=0)
            widths.append(group.width if needed <= group.width else min(group.max_width, 2 * needed))
        self.widen(widths)
