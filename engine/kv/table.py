"""The blocks of one KV group: the block table of each sequence, and the blocks that it could share.

`Capacity` is the KV memory of one engine and what it holds: KV groups (layers whose keys and values share blocks), how
far back those are kept, and the sequences and tokens of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from collections.abc import Sequence as Names
from dataclasses import dataclass, field

from engine.kv.blocks import BlockPool


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


@dataclass(slots=True)
class Table:
    """The block table of a sequence in one group. Token i is at offset i % block_size of block i // block_size."""

    blocks: list[int] = field(default_factory=list)
    first: int = 0
    """The index in the sequence of blocks[0]. The blocks before it fell out of the window, or were never allocated."""

    def lengthen(self, pool: BlockPool, count: int) -> None:
        """Append `count` blocks from the pool, which must have that many available."""
        self.blocks += pool.allocate(count, self.blocks[-1] if self.blocks else None)


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks that a sequence would get in one group if it were admitted now."""

    first: int
    """`Table.first` of the new table."""
    shared: list[int]
    """The blocks to share at the beginning of the table."""
    copy_from: int | None
    """The block to copy into the first one that is not shared. It holds the last of the computed tokens."""
    fresh: int
    """The number of blocks to allocate."""
    cost: int
    """The number of available blocks that the sequence needs to begin: `fresh`, the blocks of `shared` without
    references, and the block that the first token to be computed needs."""


class GroupTables:
    """The block pool of a group whose queries see all tokens before them."""

    def __init__(self, space: KvSpace, block_size: int) -> None:
        self.pool = BlockPool(space.num_blocks, space.run)
        self._size = block_size
        #: The blocks that an admission leaves to the running sequences, so that it does not soon preempt one of them.
        self.headroom = max(1, space.num_blocks // 100)

    def shareable(self, names: Names[bytes], limit: int) -> int:
        """The number of leading blocks, up to `limit`, that can be shared: the cache has all that later queries see."""
        return len(self.pool.match(names[:limit]))

    def cached_table(self, names: Names[bytes], blocks: int) -> tuple[int, list[int]]:
        """A table that begins with `blocks` cached blocks, as (first, blocks)."""
        return 0, self.pool.match(names[:blocks])

    def donated_table(self, donor: Table, computed: int) -> tuple[int, list[int], int | None] | None:
        """A table that begins with `donor`'s first `computed` tokens, as (first, blocks, block to copy or None).

        Returns None if the donor no longer has the blocks that later queries see.
        """
        first = self._first(computed)
        if donor.first > first:
            return None
        whole, part = divmod(computed, self._size)
        blocks = donor.blocks[first - donor.first : whole - donor.first]
        return first, blocks, donor.blocks[whole - donor.first] if part else None

    def part(self, first: int, shared: list[int], copy_from: int | None, tokens: int) -> Part:
        fresh = -(-tokens // self._size) - len(shared)
        return Part(first, shared, copy_from, fresh, fresh + len(shared) - self.pool.count_referenced(shared))

    def missing(self, table: Table, computed: int, count: int, tokens: int) -> int:
        """The number of blocks to allocate before computing `count` tokens after the `computed` ones.

        `tokens` is the sequence's length. Without a window, all of its tokens get blocks at admission, so that an
        admitted prompt can be computed.
        """
        return -(-tokens // self._size) - len(table.blocks)

    def computable(self, table: Table, computed: int, count: int, spare: int) -> int:
        """The number of `count` tokens that can be computed, leaving `spare` blocks available if possible."""
        return count

    def drop_unseen(self, table: Table, computed: int) -> None:
        """Release the blocks that no query after `computed` tokens sees."""

    def whole(self, table: Table, computed: int) -> bool:
        """Whether a table has the blocks that its sequence needs to go on after `computed` tokens."""
        return table.first <= self._first(computed) and computed <= (table.first + len(table.blocks)) * self._size

    def _first(self, computed: int) -> int:
        return 0


class WindowTables(GroupTables):
    """The block pool of a group whose queries see no further back than a window.

    A sequence gets each block when it reaches it, and releases the block when it falls out of the window. So it never
    holds more than the blocks that the queries of one step see, and one block that they no longer see.
    """

    def __init__(self, space: KvSpace, block_size: int, window: int) -> None:
        super().__init__(space, block_size)
        self._window = window
        self._max_blocks = window_blocks(window, block_size)

    def shareable(self, names: Names[bytes], limit: int) -> int:
        blocks = limit
        while blocks > 0:
            # Goes backwards over the window. If a block is missing, a shorter prefix that ends before it is tried.
            first = self._first(blocks * self._size)
            missing = next((i for i in range(blocks - 1, first - 1, -1) if not self.pool.knows(names[i])), None)
            if missing is None:
                return blocks
            blocks = missing
        return 0

    def cached_table(self, names: Names[bytes], blocks: int) -> tuple[int, list[int]]:
        first = self._first(blocks * self._size)
        return first, self.pool.match(names[first:blocks])

    def part(self, first: int, shared: list[int], copy_from: int | None, tokens: int) -> Part:
        needed = min(-(-tokens // self._size) - first, self._max_blocks)
        fresh = 0 if copy_from is None else 1
        return Part(first, shared, copy_from, fresh, needed - self.pool.count_referenced(shared))

    def missing(self, table: Table, computed: int, count: int, tokens: int) -> int:
        return -(-(computed + count) // self._size) - table.first - len(table.blocks)

    def computable(self, table: Table, computed: int, count: int, spare: int) -> int:
        end = table.first + len(table.blocks)
        available = self.pool.available
        # One token may always use the last block: the other sequences may wait for this one.
        needed = -(-(computed + 1) // self._size) - end
        reach = end + max(min(needed, available), available - spare)
        return min(count, reach * self._size - computed)

    def drop_unseen(self, table: Table, computed: int) -> None:
        count = self._first(computed) - table.first
        if count > 0:
            self.pool.release(table.blocks[:count])
            del table.blocks[:count]
            table.first += count

    def _first(self, computed: int) -> int:
        return first_block(self._window, computed, self._size)
