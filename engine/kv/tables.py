"""The block tables of sequences over all KV groups: sharing, allocation and release.

A sequence has a table in each KV group. It shares the same tokens in all groups: tokens count as computed only if every
group has the K/V that later queries see of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Each
from dataclasses import dataclass
from typing import Final

from engine.errors import EngineError
from engine.kv.table import GroupTables, KvSpace, Part, Table, WindowTables
from engine.prefix import extend_hashes, mark_of, marked_blocks
from engine.sequence import Sequence

#: Marks of prefixes that are remembered, the newest: for a broker, which sends prompts to where they are cached.
MARKS: Final = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """The blocks that a sequence would get if it were admitted now."""

    computed: int
    """The number of leading tokens whose K/V it would share."""
    parts: tuple[Part, ...]
    """One part for each group."""


class BlockTables:
    def __init__(self, spaces: Each[KvSpace], block_size: int, caching: bool) -> None:
        self.groups = [
            GroupTables(space, block_size) if space.window is None else WindowTables(space, block_size, space.window)
            for space in spaces
        ]
        self.block_size = block_size
        self._caching = caching
        self._marked_blocks = marked_blocks(block_size)
        #: Hashes of the last MARKS blocks with a mark that were registered, the newest last.
        self._marked: dict[bytes, None] = {}

    @property
    def used(self) -> int:
        return sum(group.pool.used for group in self.groups)

    @property
    def cached(self) -> int:
        return sum(group.pool.cached for group in self.groups)

    @property
    def num_blocks(self) -> int:
        return sum(group.pool.num_blocks for group in self.groups)

    # ---- admission

    def claim(self, seq: Sequence, donor: Sequence | None) -> Claim:
        """Find what a waiting sequence can share: cached blocks or the prompt of `donor`, whichever saves more.

        `donor` is a choice of the same request whose prompt is computed. At least the last token is always computed,
        because its logits are needed.
        """
        computed, places = self._cached(seq)
        common = min(seq.prompt_len, len(seq.tokens) - 1)
        if donor is not None and common > computed:
            donated = [
                group.donated_table(table, common) for group, table in zip(self.groups, donor.tables, strict=True)
            ]
            whole = [part for part in donated if part is not None]
            if len(whole) == len(donated):
                computed, places = common, whole
        total = len(seq.tokens)
        parts = (group.part(*part, total) for group, part in zip(self.groups, places, strict=True))
        return Claim(computed, tuple(parts))

    def _cached(self, seq: Sequence) -> tuple[int, list[tuple[int, list[int], int | None]]]:
        """The number of tokens in the prefix cache, and (first, blocks, None) of each group's table."""
        blocks = 0
        if self._caching:
            blocks = seq.reusable // self.block_size
            extend_hashes(seq.hashes, seq.root, seq.tokens, self.block_size, blocks)
            before = -1
            while blocks != before:
                # If one group lacks a block, the prefix becomes shorter, and then another group may lack one.
                before = blocks
                for group in self.groups:
                    blocks = group.shareable(seq.hashes, blocks)
        return blocks * self.block_size, [(*group.cached_table(seq.hashes, blocks), None) for group in self.groups]

    def fits(self, claim: Claim, *, headroom: bool) -> bool:
        for group, part in zip(self.groups, claim.parts, strict=True):
            if part.cost + (group.headroom if headroom else 0) > group.pool.available:
                return False
        return True

    def fits_without(self, claim: Claim, victims: Each[Sequence], *, headroom: bool) -> bool:
        """Whether the claim would fit if the `victims` released their blocks."""
        for i, (group, part) in enumerate(zip(self.groups, claim.parts, strict=True)):
            freed = group.pool.freed_by((victim.tables[i].blocks for victim in victims), keep=part.shared)
            if part.cost + (group.headroom if headroom else 0) > group.pool.available + freed:
                return False
        return True

    def take(self, seq: Sequence, claim: Claim) -> list[tuple[int, int, int]]:
        """Carry out a claim made just now. Returns (group, source, destination) of the blocks to copy."""
        copies = []
        for i, (group, part) in enumerate(zip(self.groups, claim.parts, strict=True)):
            # Share first: allocating might evict the very blocks to be shared.
            group.pool.share(part.shared)
            table = Table(list(part.shared), part.first)
            table.lengthen(group.pool, part.fresh)
            seq.tables.append(table)
            if part.copy_from is not None:
                copies.append((i, part.copy_from, table.blocks[len(part.shared)]))
        seq.computed = claim.computed
        seq.registered = claim.computed // self.block_size
        seq.allocated = self._allocated(seq)
        return copies

    def forkable(self, parent: Sequence) -> bool:
        """Whether there are the blocks for `fork`."""
        return not parent.computed % self.block_size or all(group.pool.available for group in self.groups)

    def fork(self, child: Sequence, parent: Sequence) -> list[tuple[int, int, int]]:
        """Let a new sequence share all that a running one has computed, whole blocks by reference. Returns (group,
        source, destination) of the block to copy, if the last one is not full: both go on to write in it."""
        copies = []
        for i, (group, donor) in enumerate(zip(self.groups, parent.tables, strict=True)):
            donated = group.donated_table(donor, parent.computed)
            assert donated is not None
            first, shared, copy_from = donated
            group.pool.share(shared)
            table = Table(list(shared), first)
            child.tables.append(table)
            if copy_from is not None:
                table.lengthen(group.pool, 1)
                copies.append((i, copy_from, table.blocks[-1]))
        child.computed, child.registered = parent.computed, parent.registered
        child.allocated = self._allocated(child)
        return copies

    # ---- while it runs

    def grow(self, seq: Sequence, count: int, spare: int) -> int:
        """Allocate blocks for the next `count` tokens of a running sequence. Returns the number of tokens that fit.

        It leaves the `spare` blocks to others, except that one token may take those too. Returns 0 if not even one
        token fits.
        """
        if seq.computed + count <= seq.allocated:
            # The usual case of a decode: blocks are allocated and released only when one is full.
            return count
        for group, table in zip(self.groups, seq.tables, strict=True):
            group.drop_unseen(table, seq.computed)
            count = group.computable(table, seq.computed, count, spare)
        total = len(seq.tokens)
        lacks = [
            group.missing(table, seq.computed, count, total)
            for group, table in zip(self.groups, seq.tables, strict=True)
        ]
        if count <= 0 or any(lack > group.pool.available for group, lack in zip(self.groups, lacks, strict=True)):
            return 0
        for group, table, lack in zip(self.groups, seq.tables, lacks, strict=True):
            if lack > 0:
                table.lengthen(group.pool, lack)
        seq.allocated = self._allocated(seq)
        return count

    def reach(self, seq: Sequence, count: int, spare: int) -> int:
        """Allocate blocks for up to `count` draft tokens after all tokens of a running sequence. Returns how many fit.

        It allocates nothing if fewer than `spare` blocks would be left.
        """
        end = len(seq.tokens) + count
        if end > seq.allocated:
            # `grow` has nothing to allocate, and so drops nothing, while every step's drafts reach further.
            for group, table in zip(self.groups, seq.tables, strict=True):
                group.drop_unseen(table, seq.computed)
            lacks = [-(-end // self.block_size) - table.first - len(table.blocks) for table in seq.tables]
            if any(lack + spare > group.pool.available for group, lack in zip(self.groups, lacks, strict=True)):
                return min(count, seq.allocated - len(seq.tokens))
            for group, table, lack in zip(self.groups, seq.tables, lacks, strict=True):
                if lack > 0:
                    table.lengthen(group.pool, lack)
            seq.allocated = self._allocated(seq)
        return count

    def _allocated(self, seq: Sequence) -> int:
        return min(table.first + len(table.blocks) for table in seq.tables) * self.block_size

    def register(self, seq: Sequence) -> None:
        """Enter the blocks that computed tokens have filled into the prefix cache."""
        full = seq.computed // self.block_size
        if not self._caching or full == seq.registered:
            return
        extend_hashes(seq.hashes, seq.root, seq.tokens, self.block_size, full)
        for group, table in zip(self.groups, seq.tables, strict=True):
            for index in range(max(seq.registered, table.first), full):
                group.pool.register(table.blocks[index - table.first], seq.hashes[index])
        for count in self._marked_blocks:
            if seq.registered < count <= full:
                self._mark(seq.hashes[count - 1])
        seq.registered = full

    def _mark(self, name: bytes) -> None:
        self._marked.pop(name, None)
        self._marked[name] = None
        if len(self._marked) > MARKS:
            del self._marked[next(iter(self._marked))]

    def marks(self) -> list[str]:
        """The marks (`engine.prefix`) of prefixes that the cache has now, at most MARKS, the newest last. Any thread
        may ask."""
        cached = (name for name in list(self._marked) if all(group.pool.knows(name) for group in self.groups))
        return [mark_of(name) for name in cached]

    # ---- the end

    def forget(self, seq: Sequence, computed: int = 0) -> None:
        """Remove a sequence's blocks after `computed` tokens from the prefix cache, because their K/V may be faulty.

        It finds them by hash, because the sequence may have released some or all of its blocks in the meantime.
        """
        for group in self.groups:
            group.pool.forget(seq.hashes[computed // self.block_size :])

    def free(self, seq: Sequence) -> None:
        for group, table in zip(self.groups, seq.tables, strict=True):
            group.pool.release(table.blocks)
        seq.tables = []
        seq.computed = seq.registered = seq.allocated = 0

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise EngineError unless pools and tables agree and every sequence can go on. Takes time proportional to
        their size."""
        sequences = list(running)
        for i, group in enumerate(self.groups):
            group.pool.check_integrity(seq.tables[i].blocks for seq in sequences)
            for seq in sequences:
                if not group.whole(seq.tables[i], seq.computed):
                    raise EngineError(f"request {seq.request.id!r} lacks blocks of its {seq.computed} computed tokens")
