"""Layers whose keys and values live together, and how far back they have to be kept."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that see equally far back: they have blocks, tables and memory of their own."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """How many tokens a query sees, its own included; None for all before it."""


@dataclass(frozen=True, slots=True)
class KvSpace:
    """The memory of one group."""

    num_blocks: int
    window: int | None = None
    run: int = 1
    """Blocks that a sequence is given side by side where that can be."""

    def tokens_of_one(self, block_size: int) -> int:
        """Tokens of the longest sequence that can be computed in it."""
        if self.window is not None and self.num_blocks >= window_blocks(self.window, block_size):
            return sys.maxsize
        return self.num_blocks * block_size

    def tokens_of_all(self, block_size: int, length: int) -> int:
        """Tokens of whole sequences, of up to `length` each, that it has room for at one time.

        Behind a window a sequence takes the same room however long it is.
        """
        tokens = self.num_blocks * block_size
        if self.window is None:
            return tokens
        return max(tokens, self.num_blocks // window_blocks(self.window, block_size) * length)


def window_blocks(window: int, block_size: int) -> int:
    """The most blocks over which what one query sees can extend."""
    return -(-(window - 1) // block_size) + 1


def first_block(window: int | None, computed: int, block_size: int) -> int:
    """The first block that the query after `computed` tokens, or any later one, sees."""
    return 0 if window is None else max(0, computed - window + 1) // block_size
