"""KV groups: layers whose keys and values share blocks, and how far back those are kept."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """A group of layers that see equally far back. Each group has its own blocks, tables and memory."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """The number of tokens that a query sees, its own included. None: all tokens before it."""


@dataclass(frozen=True, slots=True)
class KvSpace:
    """The KV memory of one group."""

    num_blocks: int
    window: int | None = None
    run: int = 1
    """The number of neighbouring blocks that a sequence gets if possible."""

    def tokens_of_one(self, block_size: int) -> int:
        """The tokens of the longest sequence that can be computed in it."""
        if self.window is not None and self.num_blocks >= window_blocks(self.window, block_size):
            return sys.maxsize
        return self.num_blocks * block_size

    def tokens_of_all(self, block_size: int, length: int) -> int:
        """The tokens of whole sequences, each of up to `length`, that fit at one time.

        With a window, a sequence takes the same number of blocks however long it is.
        """
        tokens = self.num_blocks * block_size
        if self.window is None:
            return tokens
        return max(tokens, self.num_blocks // window_blocks(self.window, block_size) * length)


def window_blocks(window: int, block_size: int) -> int:
    """The most blocks over which the tokens that one query sees can extend."""
    return -(-(window - 1) // block_size) + 1


def first_block(window: int | None, computed: int, block_size: int) -> int:
    """The first block that the query after `computed` tokens, or any later one, sees."""
    return 0 if window is None else max(0, computed - window + 1) // block_size
