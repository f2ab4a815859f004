"""The pool of KV blocks: who holds which, and which stay cached when nobody does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from engine.errors import EngineError
from engine.kv.free import FreeBlocks


class BlockPool:
    """Block numbers 0 to num_blocks - 1, each in one of three states:

        free  --allocate-->  held (references > 0)  --release-->  free, or cached if it was registered
        cached (registered, no references)  --share-->  held;  --evicted by allocate-->  held by another

    `available` counts free and cached ones: what can be allocated. `run`: so many neighbours are given to one table
    where that can be (engine/kv/free.py).
    """

    def __init__(self, num_blocks: int, run: int = 1) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = FreeBlocks(num_blocks, run)
        # Insertion order is the order of release: the first is the least recently used.
        self._cached: dict[int, None] = {}
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks with one reference each; the caller has seen to it that so many are available.

        They are for a table that ends with the block `after`.
        """
        blocks = []
        for _ in range(count):
            found = self._free.take(after)
            if found is None:
                self._evict()
                found = self._free.take(None)
            after = self._free.take_any() if found is None else found
            self._references[after] = 1
            blocks.append(after)
        return blocks

    def _evict(self) -> None:
        """Let go of what was used least recently until a run has room, or for as many blocks as two have.

        With a block go those that come next and are of its run: they were one sequence's.
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
        """One more reference to each; cached ones are no longer evictable."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One reference less to each block of a sequence's table.

        From the last to the first, so that the end of a prefix is evicted before its beginning, without which
        the end could not be found.
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
        """Make a held, full, computed block findable. A hash that another block already has is left to it."""
        if name not in self._by_hash and block not in self._hash_of:
            self._by_hash[name] = block
            self._hash_of[block] = name

    def forget(self, names: Iterable[bytes]) -> None:
        """Make blocks unfindable, held or cached, because what is in them is not to be trusted."""
        for name in names:
            block = self._by_hash.pop(name, None)
            if block is not None:
                del self._hash_of[block]
                if block in self._cached:
                    del self._cached[block]
                    self._free.put(block)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a chain of hashes, with no reference taken."""
        blocks = []
        for name in names:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def knows(self, name: bytes) -> bool:
        return name in self._by_hash

    def held(self, blocks: Iterable[int]) -> int:
        """How many of these somebody holds, so that sharing them takes nothing from what is available."""
        return sum(self._references[block] > 0 for block in blocks)

    def freed_by(self, tables: Iterable[list[int]], keep: Iterable[int] = ()) -> int:
        """How many blocks, beside those to `keep`, become available if the holders of these tables let go."""
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
