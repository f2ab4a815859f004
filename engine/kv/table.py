"""One KV group's blocks: what of them a sequence holds, and what it could share."""

from __future__ import annotations

from collections.abc import Sequence as Names
from dataclasses import dataclass, field

from engine.kv.blocks import BlockPool
from engine.kv.groups import KvSpace, first_block, window_blocks


@dataclass(slots=True)
class Table:
    """The blocks of a sequence in one group, in order. Token i is at place i % block_size of block i // block_size."""

    blocks: list[int] = field(default_factory=list)
    first: int = 0
    """Which of the sequence's blocks blocks[0] is; those before it have fallen out of the window, or never were."""

    def lengthen(self, pool: BlockPool, count: int) -> None:
        """By so many blocks, which the pool has."""
        self.blocks += pool.allocate(count, self.blocks[-1] if self.blocks else None)


@dataclass(frozen=True, slots=True)
class Part:
    """What a sequence would get in one group if it were admitted now."""

    first: int
    """Of the new table."""
    shared: list[int]
    """Blocks to share at the beginning of the table."""
    copy_from: int | None
    """Block to copy into the first one that is not shared: it holds the last of the computed tokens."""
    fresh: int
    """Blocks to allocate."""
    cost: int
    """How many available blocks it takes to begin: these, those of `shared` that nobody holds, and what the first
    token to be computed needs beside."""


class GroupTables:
    """The pool of a group whose queries see all before them."""

    def __init__(self, space: KvSpace, block_size: int) -> None:
        self.pool = BlockPool(space.num_blocks, space.run)
        self._size = block_size
        #: Blocks that an admission leaves to those who run, so that it does not put one of them out at once.
        self.headroom = max(1, space.num_blocks // 100)

    def found(self, names: Names[bytes], most: int) -> int:
        """How many leading blocks, up to `most`, could be shared if all that later queries see of them is cached."""
        return len(self.pool.match(names[:most]))

    def cached(self, names: Names[bytes], blocks: int) -> tuple[int, list[int]]:
        """(first, blocks) of a table that begins with so many cached blocks."""
        return 0, self.pool.match(names[:blocks])

    def given(self, donor: Table, computed: int) -> tuple[int, list[int], int | None] | None:
        """(first, blocks, block to copy) of a table that begins with `donor`'s first `computed` tokens; None where it
        no longer has what later queries see of them."""
        first = self._first(computed)
        if donor.first > first:
            return None
        whole, part = divmod(computed, self._size)
        blocks = donor.blocks[first - donor.first : whole - donor.first]
        return first, blocks, donor.blocks[whole - donor.first] if part else None

    def part(self, first: int, shared: list[int], copy_from: int | None, tokens: int) -> Part:
        fresh = -(-tokens // self._size) - len(shared)
        return Part(first, shared, copy_from, fresh, fresh + len(shared) - self.pool.held(shared))

    def lacking(self, table: Table, computed: int, count: int, tokens: int) -> int:
        """Blocks to allocate before `count` tokens after the `computed` ones are; `tokens` is all that there are.

        Here all of a sequence's tokens have their place from the beginning: a prompt that is let in can be computed.
        """
        return -(-tokens // self._size) - len(table.blocks)

    def room(self, table: Table, computed: int, count: int, spare: int) -> int:
        """Of `count` tokens, how many can be computed with the blocks there are, if need be less `spare` ones."""
        return count

    def drop(self, table: Table, computed: int) -> None:
        """Let go of what no query after `computed` tokens sees."""

    def whole(self, table: Table, computed: int) -> bool:
        """Whether a table has what its sequence needs to go on after `computed` tokens."""
        return table.first <= self._first(computed) and computed <= (table.first + len(table.blocks)) * self._size

    def _first(self, computed: int) -> int:
        return 0


class WindowTables(GroupTables):
    """The pool of a group whose queries see no further back than a window.

    A sequence gets its blocks as it comes to them and lets go of them as they fall out of the window, so that it never
    holds more than what the queries of one step see, and a block that they no longer see.
    """

    def __init__(self, space: KvSpace, block_size: int, window: int) -> None:
        super().__init__(space, block_size)
        self._window = window
        self._most = window_blocks(window, block_size)

    def found(self, names: Names[bytes], most: int) -> int:
        blocks = most
        while blocks > 0:
            # Backwards over the window: what is before a missing block is looked at for a shorter beginning.
            first = self._first(blocks * self._size)
            missing = next((i for i in range(blocks - 1, first - 1, -1) if not self.pool.knows(names[i])), None)
            if missing is None:
                return blocks
            blocks = missing
        return 0

    def cached(self, names: Names[bytes], blocks: int) -> tuple[int, list[int]]:
        first = self._first(blocks * self._size)
        return first, self.pool.match(names[first:blocks])

    def part(self, first: int, shared: list[int], copy_from: int | None, tokens: int) -> Part:
        needed = min(-(-tokens // self._size) - first, self._most)
        fresh = 0 if copy_from is None else 1
        return Part(first, shared, copy_from, fresh, needed - self.pool.held(shared))

    def lacking(self, table: Table, computed: int, count: int, tokens: int) -> int:
        return -(-(computed + count) // self._size) - table.first - len(table.blocks)

    def room(self, table: Table, computed: int, count: int, spare: int) -> int:
        held = table.first + len(table.blocks)
        available = self.pool.available
        # For one token always, as long as there is a block: it may be what the others wait for.
        needed = -(-(computed + 1) // self._size) - held
        reach = held + max(min(needed, available), available - spare)
        return min(count, reach * self._size - computed)

    def drop(self, table: Table, computed: int) -> None:
        count = self._first(computed) - table.first
        if count > 0:
            self.pool.release(table.blocks[:count])
            del table.blocks[:count]
            table.first += count

    def _first(self, computed: int) -> int:
        return first_block(self._window, computed, self._size)
