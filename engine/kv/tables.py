"""The block tables of sequences: what one can share, what it needs beside, and what it gives back.

A sequence has a table in each KV group. What it shares it shares in all of them: tokens count as computed where every
group has what later queries see of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Each
from dataclasses import dataclass

from engine.errors import EngineError
from engine.kv.groups import KvSpace
from engine.kv.prefix import extend_hashes
from engine.kv.table import GroupTables, Part, Table, WindowTables
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Claim:
    """How a sequence would get its blocks if it were admitted now."""

    computed: int
    """Tokens whose K/V are then there."""
    parts: tuple[Part, ...]
    """One for each group."""


class BlockTables:
    def __init__(self, spaces: Each[KvSpace], block_size: int, caching: bool) -> None:
        self.groups = [
            GroupTables(space, block_size) if space.window is None else WindowTables(space, block_size, space.window)
            for space in spaces
        ]
        self.block_size = block_size
        self._caching = caching
        #: Tokens of the longest sequence that can be computed.
        self.capacity = min(space.tokens_of_one(block_size) for space in spaces)

    @property
    def used(self) -> int:
        return sum(group.pool.used for group in self.groups)

    @property
    def num_blocks(self) -> int:
        return sum(group.pool.num_blocks for group in self.groups)

    # ---- admission

    def claim(self, seq: Sequence, donor: Sequence | None) -> Claim:
        """What a waiting sequence could share: cached blocks, or the prompt of `donor`, a choice of the same
        request whose prompt is computed; whichever saves more.

        At least the last token is always left to compute: its logits are wanted.
        """
        computed, places = self._cached(seq)
        common = min(seq.prompt_len, len(seq.tokens) - 1)
        if donor is not None and common > computed:
            given = [group.given(table, common) for group, table in zip(self.groups, donor.tables, strict=True)]
            whole = [place for place in given if place is not None]
            if len(whole) == len(given):
                computed, places = common, whole
        total = len(seq.tokens)
        parts = (group.part(*place, total) for group, place in zip(self.groups, places, strict=True))
        return Claim(computed, tuple(parts))

    def _cached(self, seq: Sequence) -> tuple[int, list[tuple[int, list[int], int | None]]]:
        """Tokens that the prefix cache saves, and where: (first, blocks, None) of each group's table."""
        blocks = 0
        if self._caching:
            blocks = seq.reusable // self.block_size
            extend_hashes(seq.hashes, seq.root, seq.tokens, self.block_size, blocks)
            before = -1
            while blocks != before:
                # What one group lacks makes the beginning shorter, and then another may lack something.
                before = blocks
                for group in self.groups:
                    blocks = group.found(seq.hashes, blocks)
        return blocks * self.block_size, [(*group.cached(seq.hashes, blocks), None) for group in self.groups]

    def fits(self, claim: Claim, *, headroom: bool) -> bool:
        for group, part in zip(self.groups, claim.parts, strict=True):
            if part.cost + (group.headroom if headroom else 0) > group.pool.available:
                return False
        return True

    def fits_without(self, claim: Claim, victims: Each[Sequence], *, headroom: bool) -> bool:
        """Whether it would fit if the `victims` let go of what they hold."""
        for i, (group, part) in enumerate(zip(self.groups, claim.parts, strict=True)):
            freed = group.pool.freed_by((victim.tables[i].blocks for victim in victims), keep=part.shared)
            if part.cost + (group.headroom if headroom else 0) > group.pool.available + freed:
                return False
        return True

    def take(self, seq: Sequence, claim: Claim) -> list[tuple[int, int, int]]:
        """Carry out a claim made just now; the answer is (group, source, destination) of the blocks to copy."""
        copies = []
        for i, (group, part) in enumerate(zip(self.groups, claim.parts, strict=True)):
            # Shared first, or allocating might evict the very blocks to be shared.
            group.pool.share(part.shared)
            table = Table(list(part.shared), part.first)
            table.lengthen(group.pool, part.fresh)
            seq.tables.append(table)
            if part.copy_from is not None:
                copies.append((i, part.copy_from, table.blocks[len(part.shared)]))
        seq.computed = claim.computed
        seq.registered = claim.computed // self.block_size
        seq.room = self._room(seq)
        return copies

    # ---- while it runs

    def grow(self, seq: Sequence, count: int, spare: int) -> int:
        """Make room for the next `count` tokens of a running sequence, or for as many of them as there are blocks for
        (at least one, if that takes the `spare` blocks too); 0 where there is none for one.
        """
        if seq.computed + count <= seq.room:
            # Nearly always, at a decode: blocks come, and go, only where one is full.
            return count
        for group, table in zip(self.groups, seq.tables, strict=True):
            group.drop(table, seq.computed)
            count = group.room(table, seq.computed, count, spare)
        total = len(seq.tokens)
        wanted = [
            group.lacking(table, seq.computed, count, total)
            for group, table in zip(self.groups, seq.tables, strict=True)
        ]
        if count <= 0 or any(lack > group.pool.available for group, lack in zip(self.groups, wanted, strict=True)):
            return 0
        for group, table, lack in zip(self.groups, seq.tables, wanted, strict=True):
            if lack > 0:
                table.lengthen(group.pool, lack)
        seq.room = self._room(seq)
        return count

    def reach(self, seq: Sequence, count: int, spare: int) -> int:
        """Make room for up to `count` tokens after all that a running sequence has; the answer is for how many of them
        there is room. No block is taken for them of which fewer than `spare` would be left.
        """
        end = len(seq.tokens) + count
        if end > seq.room:
            wanted = [-(-end // self.block_size) - table.first - len(table.blocks) for table in seq.tables]
            if any(lack + spare > group.pool.available for group, lack in zip(self.groups, wanted, strict=True)):
                return min(count, seq.room - len(seq.tokens))
            for group, table, lack in zip(self.groups, seq.tables, wanted, strict=True):
                if lack > 0:
                    table.lengthen(group.pool, lack)
            seq.room = self._room(seq)
        return count

    def _room(self, seq: Sequence) -> int:
        return min(table.first + len(table.blocks) for table in seq.tables) * self.block_size

    def register(self, seq: Sequence) -> None:
        """Offer the blocks that computed tokens have filled to the prefix cache."""
        full = seq.computed // self.block_size
        if not self._caching or full == seq.registered:
            return
        extend_hashes(seq.hashes, seq.root, seq.tokens, self.block_size, full)
        for group, table in zip(self.groups, seq.tables, strict=True):
            for index in range(max(seq.registered, table.first), full):
                group.pool.register(table.blocks[index - table.first], seq.hashes[index])
        seq.registered = full

    # ---- the end

    def forget(self, seq: Sequence, computed: int = 0) -> None:
        """Make unfindable what a sequence left in the cache after `computed` tokens, because it is not to be trusted.

        By the hashes of its blocks, since it may have let go of some, or of all, in the meantime.
        """
        for group in self.groups:
            group.pool.forget(seq.hashes[computed // self.block_size :])

    def free(self, seq: Sequence) -> None:
        for group, table in zip(self.groups, seq.tables, strict=True):
            group.pool.release(table.blocks)
        seq.tables = []
        seq.computed = seq.registered = seq.room = 0

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise EngineError unless pools and tables agree and every sequence can go on. Takes time with their size."""
        sequences = list(running)
        for i, group in enumerate(self.groups):
            group.pool.check_integrity(seq.tables[i].blocks for seq in sequences)
            for seq in sequences:
                if not group.whole(seq.tables[i], seq.computed):
                    raise EngineError(f"request {seq.request.id!r} lacks blocks of its {seq.computed} computed tokens")
