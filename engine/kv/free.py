"""The free blocks, given out so that a sequence's blocks are neighbours.

If blocks are of a few KiB, a CPU reads neighbouring blocks up to twice as fast as scattered ones. So blocks form runs
of neighbours. A sequence that begins in a run goes on in it, while other sequences begin in other runs. A run is

   whole    if all its blocks are free
   kept     for the sequence that goes on in it, if that holds the block before the free ones
   open     to any sequence, if half or more of its blocks are free
   scraps   if fewer are free: it waits for its neighbours, because else runs would become ever shorter

This is only a preference: if all other blocks are taken, any sequence gets scraps, and then blocks kept for another.
"""

from __future__ import annotations

from collections.abc import Iterator


class FreeBlocks:
    """The free blocks among 0 to blocks - 1, in runs of `run` blocks. At first all are free."""

    def __init__(self, blocks: int, run: int) -> None:
        self.run = run
        self._is_free = bytearray(b"\1") * blocks
        self._size = [min(run, blocks - first) for first in range(0, blocks, run)]
        self._free_blocks = list(self._size)
        self._count = blocks
        # Stacks of runs with the lowest on top, so that a small load touches little memory.
        self._whole = dict.fromkeys(range(len(self._free_blocks) - 1, -1, -1))
        self._open: dict[int, None] = {}
        self._scraps: dict[int, None] = {}
        self._kept: dict[int, None] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (block for block, free in enumerate(self._is_free) if free)

    @property
    def roomy(self) -> bool:
        """Whether any run is whole or open."""
        return bool(self._whole or self._open)

    def take(self, after: int | None) -> int | None:
        """Take the block after `after` if it is free, else the first one of a whole or open run. None if there is
        none."""
        if after is not None and after + 1 < len(self._is_free) and self._is_free[after + 1]:
            return self.claim(after + 1)
        for runs in (self._whole, self._open):
            if runs:
                run = next(reversed(runs))
                return self.claim(self._is_free.index(1, run * self.run))
        return None

    def take_any(self) -> int:
        """Take a block of the scraps, else the last block of a run kept for another sequence. There must be a free
        block."""
        run = next(iter(self._scraps or self._kept))
        first = run * self.run
        return self.claim(self._is_free.rindex(1, first, first + self._size[run]))

    def claim(self, block: int) -> int:
        """Take a free block. The blocks after it in its run are kept for the same sequence."""
        run = block // self.run
        self._is_free[block] = 0
        self._count -= 1
        self._free_blocks[run] -= 1
        self._classify(run, kept=True)
        return block

    def put(self, block: int) -> None:
        """Make a block free again."""
        run = block // self.run
        self._is_free[block] = 1
        self._count += 1
        self._free_blocks[run] += 1
        self._classify(run, kept=run in self._kept)

    def leave(self, block: int) -> None:
        """No sequence goes on after this block: the blocks kept after it are for any sequence."""
        run = block // self.run
        if run in self._kept:
            self._classify(run, kept=False)

    def _classify(self, run: int, kept: bool) -> None:
        for runs in (self._whole, self._open, self._scraps, self._kept):
            runs.pop(run, None)
        free, size = self._free_blocks[run], self._size[run]
        if free == size:
            self._whole[run] = None
        elif free and kept:
            self._kept[run] = None
        elif 2 * free >= size:
            self._open[run] = None
        elif free:
            self._scraps[run] = None
