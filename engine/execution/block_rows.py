"""The block tables of one KV group's running sequences as permanent rows. Only changed tables are written again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.kv import KvSpace, Table

Ints = NDArray[np.int64]


class BlockRows:
    """Permanent table rows: row `slot` is the table of the sequence with that slot, from the first block it still
    holds."""

    def __init__(self, space: KvSpace, slots: int, block_size: int) -> None:
        self.window = space.window
        self._size = block_size
        #: The number of the block after the last one. That block is always zero.
        self.zero_block = space.num_blocks
        # The rows are as wide as the longest table so far, because a context of millions of tokens is seldom used.
        self._rows = np.full((slots, 8), self.zero_block, np.int32)
        self._firsts = np.zeros(slots, np.int64)
        self._written: list[list[int]] = [[] for _ in range(slots)]

    def write(self, slot: int, table: Table) -> None:
        if self.window is not None:
            self._firsts[slot] = table.first
        held, blocks = self._written[slot], table.blocks
        if held == blocks:
            return
        if len(blocks) > self._rows.shape[1]:
            wider = np.full((len(self._rows), 2 * len(blocks)), self.zero_block, np.int32)
            wider[:, : self._rows.shape[1]] = self._rows
            self._rows = wider
        row = self._rows[slot]
        row[: len(blocks)] = blocks
        row[len(blocks) : len(held)] = self.zero_block
        self._written[slot] = blocks.copy()

    def skipped(self, slots: Ints) -> Ints:
        """The number of tokens of each sequence before its table begins."""
        return self._firsts[slots] * self._size

    def places(self, slots: Ints, positions: Ints) -> Ints:
        """The KV slots, block * block_size + offset, of tokens at `positions` in the tables of `slots`."""
        blocks: Ints = self._rows[slots, positions // self._size].astype(np.int64)
        return blocks * self._size + positions % self._size

    def tables(self, slots: Ints, ends: Ints) -> NDArray[np.int32]:
        """Tables that hold `ends` tokens, [sequences, blocks of the longest], padded with the zero block."""
        return self._rows[slots, : -(-int(ends.max()) // self._size)]

    def entered(self, slots: Ints, starts: Ints, ends: Ints) -> Ints:
        """The blocks that tokens from `starts` to `ends` begin to fill but do not fill up."""
        last = (ends - 1) // self._size
        chosen = (last * self._size >= starts) & (ends % self._size != 0)
        blocks: Ints = self._rows[slots[chosen], last[chosen]].astype(np.int64)
        return blocks
