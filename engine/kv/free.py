"""Free blocks, given out so that those of a sequence lie one after another.

Where blocks are of a few KiB, a CPU reads neighbours up to twice as fast as ones that lie anywhere. So there are runs
of neighbours, and a sequence that begins in one goes on in it, while others look elsewhere. Of a run

    all is free                      whole
    some is, behind who goes on      kept for him
    half or more is                  open to whoever begins next
    less is                          scraps: it waits for its neighbours, or runs would become ever shorter

Nothing is promised by that: where all else is taken, anybody gets scraps, and then what is kept for another.
"""

from __future__ import annotations

from collections.abc import Iterator


class FreeBlocks:
    """Of blocks 0 to blocks - 1, in runs of `run`: those that are free, at first all."""

    def __init__(self, blocks: int, run: int) -> None:
        self.run = run
        self._is_free = bytearray(b"\1") * blocks
        self._size = [min(run, blocks - first) for first in range(0, blocks, run)]
        self._left = list(self._size)
        self._count = blocks
        # Stacks of runs, with the lowest on top, so that little work touches little memory.
        self._whole = dict.fromkeys(range(len(self._left) - 1, -1, -1))
        self._open: dict[int, None] = {}
        self._scraps: dict[int, None] = {}
        self._kept: dict[int, None] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (block for block, free in enumerate(self._is_free) if free)

    @property
    def roomy(self) -> bool:
        """Whether a run is whole or open."""
        return bool(self._whole or self._open)

    def take(self, after: int | None) -> int | None:
        """The block after `after` if that is free, else the first of a whole or open run; None where there is none."""
        if after is not None and after + 1 < len(self._is_free) and self._is_free[after + 1]:
            return self.claim(after + 1)
        for runs in (self._whole, self._open):
            if runs:
                run = next(reversed(runs))
                return self.claim(self._is_free.index(1, run * self.run))
        return None

    def take_any(self) -> int:
        """One of the scraps, or one that is kept for another, which comes to it last. There has to be one."""
        run = next(iter(self._scraps or self._kept))
        first = run * self.run
        return self.claim(self._is_free.rindex(1, first, first + self._size[run]))

    def claim(self, block: int) -> int:
        """Take a free one; what follows it in its run is kept for the one who has it."""
        run = block // self.run
        self._is_free[block] = 0
        self._count -= 1
        self._left[run] -= 1
        self._place(run, kept=True)
        return block

    def put(self, block: int) -> None:
        """Make free again."""
        run = block // self.run
        self._is_free[block] = 1
        self._count += 1
        self._left[run] += 1
        self._place(run, kept=run in self._kept)

    def leave(self, block: int) -> None:
        """Nobody goes on after this block: what is kept behind it is for all."""
        run = block // self.run
        if run in self._kept:
            self._place(run, kept=False)

    def _place(self, run: int, kept: bool) -> None:
        for runs in (self._whole, self._open, self._scraps, self._kept):
            runs.pop(run, None)
        left, size = self._left[run], self._size[run]
        if left == size:
            self._whole[run] = None
        elif left and kept:
            self._kept[run] = None
        elif 2 * left >= size:
            self._open[run] = None
        elif left:
            self._scraps[run] = None
