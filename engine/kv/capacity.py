"""The KV memory of one engine and what it holds: KV groups (layers whose keys and values share blocks), how far back
those are kept, and the sequences and tokens of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sized once, when the model is placed, and handed down. A step holds at least one token of each sequence."""

    spaces: Sequence[KvSpace]
    """The memory of each KV group."""
    block_size: int
    """The tokens of a KV block."""
    max_num_seqs: int
    max_num_batched_tokens: int
    """The tokens of a step."""
    max_model_len: int
    """The tokens of prompt and output together."""
    max_non_priority_step_tokens: int | None = None
    """The tokens of a step without a prompt of the best tier. None: as many as of any step."""

    @property
    def step_tokens(self) -> int:
        """The tokens of a step without a prompt of the best tier."""
        return min(self.max_num_batched_tokens, self.max_non_priority_step_tokens or self.max_num_batched_tokens)

    @property
    def tokens_of_one(self) -> int:
        """The tokens of the longest sequence that the KV memory holds."""
        return min(space.tokens_of_one(self.block_size) for space in self.spaces)

    @property
    def tokens_of_all(self) -> int:
        """The tokens of whole sequences that the KV memory holds at one time."""
        return min(space.tokens_of_all(self.block_size, self.max_model_len) for space in self.spaces)
