"""What the device keeps of the running sequences from step to step: block tables, and the tokens sampled last."""

from __future__ import annotations

from collections.abc import Sequence as Each
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineError
from engine.kv import KvSpace, Table
from engine.plan import ScheduledSeq

Ints = NDArray[np.int32]

#: Up to so many numbers tables have their final width from the beginning, 256 MiB. Beyond, they grow as sequences do.
_MOST_AT_ONCE = 1 << 26
_NARROWEST = 64
#: They are counted in int32.
_MOST = (1 << 31) - 1
_NONE = np.zeros(0, np.int32)


@dataclass(slots=True)
class _Group:
    window: int | None
    most: int
    """Blocks of the longest table there can be."""
    width: int
    start: int = 0
    """Where its tables begin in the state, row after row; behind a window the rows' firsts come after them."""
    tables: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """What the device has, as far as it was told; -1 for what is not known."""
    firsts: Ints = field(default_factory=lambda: _NONE)


class DeviceRows:
    """Row `slot` belongs to the running sequence with that slot.

    All tables are one tensor, `state`, so that a step's differences are one list of (index, value), whatever they are
    of. What a step tells of each of its rows anyway (how much is computed, whether it is long) is not kept.
    """

    def __init__(
        self, spaces: Each[KvSpace], *, slots: int, block_size: int, length: int, device: torch.device
    ) -> None:
        """`length`: tokens of the longest sequence. Raises EngineError where the tables have more entries than an int32
        counts."""
        self.slots = slots
        self.block_size = block_size
        self.version = 0
        """Another one where `state` is another tensor: what was recorded with the old one is of no use."""
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        """The token that each row sampled last."""
        self._device = device
        # No block is in a table twice, so that none is longer than its pool.
        most = [max(1, min(-(-length // block_size), space.num_blocks)) for space in spaces]
        entries = slots * (sum(most) + len(most))
        if entries > _MOST:
            raise EngineError(
                f"the block tables of {slots} sequences of {length} tokens in blocks of {block_size} have {entries} "
                f"entries, more than {_MOST}; raise block_size, or lower max_num_seqs or max_model_len"
            )
        whole = entries <= _MOST_AT_ONCE
        self._groups = [
            _Group(space.window, one, one if whole else min(one, _NARROWEST))
            for space, one in zip(spaces, most, strict=True)
        ]
        self._grows = not whole
        self._held: list[list[Table | None]] = [[None] * slots for _ in spaces]
        self._counts: list[list[int]] = [[0] * slots for _ in spaces]
        self._place()

    def _place(self) -> None:
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
        #: int64 [groups, 3]: where in the state its tables begin, how wide they are, where its firsts begin or -1.
        self.layout = torch.tensor(places, dtype=torch.int64, device=self._device)
        self.forget()

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self._groups)

    def tables(self, group: int) -> Tensor:
        """int32 [slots, width]: of one KV group, from the first block that each sequence still holds."""
        one = self._groups[group]
        return self.state[one.start : one.start + one.tables.size].view(self.slots, one.width)

    def firsts(self, group: int) -> Tensor | None:
        """int32 [slots]: which of its sequence's blocks each table begins with; None where all begin with the first."""
        one = self._groups[group]
        if one.window is None:
            return None
        start = one.start + one.tables.size
        return self.state[start : start + self.slots]

    def differences(self, rows: Each[ScheduledSeq]) -> tuple[Ints, Ints]:
        """(indexes, values) that make `state` what these rows are, if all differences so far have got there.

        Where they have not, `forget` comes first. A table only ever grows at its end, or loses blocks at its beginning
        with a new `first`; another table is another object (engine.kv.Table).
        """
        if self._grows:
            self._grow(rows)
        indexes: list[Ints] = []
        values: list[Ints] = []
        for i, group in enumerate(self._groups):
            held, counts, firsts = self._held[i], self._counts[i], group.firsts
            windowed = group.window is not None
            for row in rows:
                slot, table = row.seq.slot, row.seq.tables[i]
                known = counts[slot]
                if table is not held[slot] or (windowed and firsts[slot] != table.first):
                    held[slot] = table
                    known = 0
                    if windowed and firsts[slot] != table.first:
                        firsts[slot] = table.first
                        indexes.append(np.array([group.start + group.tables.size + slot], np.int32))
                        values.append(np.array([table.first], np.int32))
                elif len(table.blocks) == known:
                    continue
                fresh = np.array(table.blocks[known:], np.int32)
                mirror = group.tables[slot, known : known + len(fresh)]
                changed = (mirror != fresh).nonzero()[0].astype(np.int32)
                indexes.append(changed + np.int32(group.start + slot * group.width + known))
                values.append(fresh[changed])
                mirror[:] = fresh
                counts[slot] = len(table.blocks)
        if not indexes:
            return _NONE, _NONE
        return np.concatenate(indexes), np.concatenate(values)

    def forget(self) -> None:
        """Nothing is known of what the device has: what a row is will be told again, whole, with its next step."""
        for i, group in enumerate(self._groups):
            group.tables.fill(-1)
            group.firsts.fill(-1)
            self._held[i] = [None] * self.slots

    def _grow(self, rows: Each[ScheduledSeq]) -> None:
        """Make tables wider, at least twofold, where one of `rows` has outgrown them."""
        outgrown = False
        for i, group in enumerate(self._groups):
            needed = max((len(row.seq.tables[i].blocks) for row in rows), default=0)
            if needed > group.width:
                group.width = min(group.most, 2 * needed)
                outgrown = True
        if outgrown:
            self._place()
            self.version += 1
