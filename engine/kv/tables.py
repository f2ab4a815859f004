"""The block tables of sequences: what one can share, what it needs beside, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from engine.kv.blocks import BlockPool
from engine.kv.prefix import extend_hashes
from engine.request import Sequence


@dataclass(frozen=True, slots=True)
class Claim:
    """How a sequence would get its blocks if it were admitted now."""

    shared: list[int]
    """Blocks to share at the beginning of the table."""
    computed: int
    """Tokens whose K/V are then there."""
    copy_from: int | None
    """Block to copy into the first one that is not shared: it holds the last of the computed tokens."""
    fresh: int
    """Blocks to allocate for the rest of the tokens."""
    cost: int
    """How many available blocks all this takes."""


class BlockTables:
    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._caching = caching

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pool.num_blocks * self.block_size

    def claim(self, seq: Sequence, donor: Sequence | None) -> Claim:
        """What a waiting sequence could share: cached blocks, or the prompt of `donor`, a choice of the same
        request whose prompt is computed; whichever saves more.

        At least the last token is always left to compute: its logits are wanted.
        """
        size = self.block_size
        shared: list[int] = []
        copy_from = None
        if self._caching:
            full = seq.reusable // size
            extend_hashes(seq.hashes, seq.root, seq.tokens, size, full)
            shared = self.pool.match(islice(seq.hashes, full))
        computed = len(shared) * size
        common = min(seq.prompt_len, len(seq.tokens) - 1)
        if donor is not None and common > computed:
            whole, part = divmod(common, size)
            shared = donor.block_table[:whole]
            copy_from = donor.block_table[whole] if part else None
            computed = common
        fresh = -(-len(seq.tokens) // size) - len(shared)
        cost = fresh + len(shared) - self.pool.held(shared)
        return Claim(shared, computed, copy_from, fresh, cost)

    def take(self, seq: Sequence, claim: Claim) -> tuple[int, int] | None:
        """Carry out a claim made just now; the answer is the (source, destination) of the block to copy, if any."""
        # Shared first, or allocating might evict the very blocks to be shared.
        self.pool.share(claim.shared)
        fresh = self.pool.allocate(claim.fresh)
        seq.block_table = claim.shared + fresh
        seq.computed = claim.computed
        seq.registered = claim.computed // self.block_size
        return None if claim.copy_from is None else (claim.copy_from, fresh[0])

    def grow(self, seq: Sequence) -> bool:
        """Make room for all of the sequence's tokens; False, with nothing taken, where blocks are lacking."""
        lacking = -(-len(seq.tokens) // self.block_size) - len(seq.block_table)
        if lacking <= 0:
            return True
        if lacking > self.pool.available:
            return False
        seq.block_table += self.pool.allocate(lacking)
        return True

    def register(self, seq: Sequence) -> None:
        """Offer the blocks that computed tokens have filled to the prefix cache."""
        full = seq.computed // self.block_size
        if not self._caching or full == seq.registered:
            return
        extend_hashes(seq.hashes, seq.root, seq.tokens, self.block_size, full)
        for index in range(seq.registered, full):
            self.pool.register(seq.block_table[index], seq.hashes[index])
        seq.registered = full

    def free(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.computed = seq.registered = 0
