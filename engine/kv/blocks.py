"""The pool of KV blocks: counts the references to each block and keeps released blocks as a prefix cache.

If blocks are of a few KiB, a CPU reads neighbouring blocks up to twice as fast as scattered ones. So free blocks are
given out (`FreeBlocks`) so that a sequence's blocks are neighbours.

A block is known by its hash (`engine.prefix`), which names it together with all tokens before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from engine.errors import EngineError


class BlockPool:
    """A pool of blocks 0 to num_blocks - 1, each in one of three states:

        free  --allocate-->  held (references > 0)  --release-->  free, or cached if it was registered
        cached (registered, no references)  --share-->  held;  --evicted by allocate-->  held by another

    `available` counts free and cached blocks, which can be allocated. `run`: the number of neighbouring blocks to give
    to one table if possible (engine/kv/blocks.py).
    """

    def __init__(self, num_blocks: int, run: int = 1) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = FreeBlocks(num_blocks, run)
        # Insertion order is the order of release: the first block is the least recently used.
        self._cached: dict[int, None] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """The blocks that no sequence holds, and whose contents sequences may share."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks with one reference each, for a table that ends with the block `after`.

        The caller has checked that enough are available.
        """
        blocks = []
        for _ in range(count):
            block = self._free.take(after)
            if block is None:
                self._evict()
                block = self._free.take(None)
            after = self._free.take_any() if block is None else block
            self._references[after] = 1
            blocks.append(after)
        return blocks

    def _evict(self) -> None:
        """Evict the least recently used blocks until a run has room, or until as many blocks as two runs are evicted.

        The next blocks of the same run go with a block, because they belonged to the same sequence.
        """
        run = None
        for count, block in enumerate(list(islice(self._cached, 2 * self._free.run))):
            if count and self._free.roomy and block // self._free.run != run:
                break
            run = block // self._free.run
            del self._cached[block]
            del self._by_hash[self._hash_of.pop(block)]
            self._free.put(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. Cached blocks are then no longer evictable."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Remove a reference from each block of a sequence's table.

        It goes from the last block to the first, so that the end of a prefix is evicted before its beginning. Without
        its beginning, the end could not be found.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.put(block)
        if blocks:
            self._free.leave(blocks[-1])

    def register(self, block: int, name: bytes) -> None:
        """Enter a held, full, computed block into the prefix cache. If another block has the hash already, it keeps
        it."""
        if name not in self._by_hash and block not in self._hash_of:
            self._by_hash[name] = block
            self._hash_of[block] = name

    def forget(self, names: Iterable[bytes]) -> None:
        """Remove blocks, held or cached, from the prefix cache, because their K/V may be faulty."""
        for name in names:
            block = self._by_hash.pop(name, None)
            if block is not None:
                del self._hash_of[block]
                if block in self._cached:
                    del self._cached[block]
                    self._free.put(block)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known prefix of a chain of hashes. Takes no references."""
        blocks = []
        for name in names:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def knows(self, name: bytes) -> bool:
        return name in self._by_hash

    def count_referenced(self, blocks: Iterable[int]) -> int:
        """Count the blocks with references. Sharing these does not reduce `available`."""
        return sum(self._references[block] > 0 for block in blocks)

    def freed_by(self, tables: Iterable[list[int]], keep: Iterable[int] = ()) -> int:
        """Count the blocks that become available if these tables are released, without the blocks to `keep`."""
        counts = Counter(block for table in tables for block in table)
        for block in keep:
            counts.pop(block, None)
        return sum(self._references[block] == count for block, count in counts.items())

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise EngineError unless the references are exactly those of `tables` and every block has one state."""
        counts = Counter(block for table in tables for block in table)
        for block, references in enumerate(self._references):
            if references != counts[block]:
                raise EngineError(f"KV block {block} has {references} references, {counts[block]} holders were found")
        idle = [*self._free, *self._cached]
        if sorted(idle) != [block for block, references in enumerate(self._references) if references == 0]:
            raise EngineError("the free and cached KV blocks are not those without references, once each")
        if {name: block for block, name in self._hash_of.items()} != self._by_hash:
            raise EngineError("the two directions of the KV block hashes do not agree")
        if any(block in self._hash_of for block in self._free) or not self._cached.keys() <= self._hash_of.keys():
            raise EngineError("a free KV block has a hash, or a cached one has none")


class FreeBlocks:
    """The free blocks among 0 to blocks - 1, in runs of `run` neighbours. At first all are free.

    A sequence that begins in a run goes on in it, while other sequences begin in other runs. A run is

       whole    if all its blocks are free
       kept     for the sequence that goes on in it, if that holds the block before the free ones
       open     to any sequence, if half or more of its blocks are free
       scraps   if fewer are free: it waits for its neighbours, because else runs would become ever shorter

    This is only a preference: if all other blocks are taken, any sequence gets scraps, and then blocks kept for
    another.
    """

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
