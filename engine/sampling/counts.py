"""Counts the tokens that running sequences have generated: a sparse list for each slot, kept from step to step.

With sparse lists the cost of a penalty is proportional to a sequence's tokens, not to the vocabulary. Of 128k tokens a
context has some hundred different ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

#: The least capacity of a slot's list, in tokens.
_ROOM = 64


class TokenCounts:
    """Token counts by slot. The lists lie in one pool, each with room to grow. A list that outgrows its place moves to
    the pool's end, so a long list costs only its own size, whatever the number of slots. Nothing is allocated before
    the first `start`."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._shape = (slots, vocab_size)
        # 0: not listed; else the number of times generated plus one. Untouched pages of this array take no memory.
        self._generated: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._pool: Ids = np.zeros(0, np.int64)
        self._end = 0
        self._starts = np.zeros(slots, np.int64)
        self._rooms = np.zeros(slots, np.int64)
        self._lengths = np.zeros(slots, np.int64)

    def start(self, slot: int, prompt: Ids, output: Ids) -> None:
        """Count a slot's tokens from the start. Tokens of `prompt` are listed too, as generated 0 times."""
        if not len(self._generated):
            self._generated = np.zeros(self._shape, np.int32)
        slots = np.array([slot])
        self._generated[slot, self._pool[self._places(slots)]] = 0
        self._lengths[slot] = 0
        listed = np.unique(np.concatenate((prompt, output)))
        room = _room(np.array([len(listed)]))
        if not len(listed) <= self._rooms[slot] <= 2 * room[0]:
            self._move(slots, room)
        self._lengths[slot] = len(listed)
        self._pool[self._places(slots)] = listed
        self._generated[slot, listed] = 1
        ids, counts = np.unique(output, return_counts=True)
        self._generated[slot, ids] += counts.astype(np.int32)

    def grow(self, slots: Ids, tokens: Ids) -> None:
        """Count one more generated token for each of the slots, which must all be different."""
        counts = self._generated[slots, tokens]
        fresh = counts == 0
        if fresh.any():
            fresh_slots = slots[fresh]
            full = fresh_slots[self._lengths[fresh_slots] == self._rooms[fresh_slots]]
            if len(full):
                self._move(full, _room(self._lengths[full]))
            self._pool[self._starts[fresh_slots] + self._lengths[fresh_slots]] = tokens[fresh]
            self._lengths[fresh_slots] += 1
        self._generated[slots, tokens] = np.maximum(counts, 1) + 1

    def pairs(self, slots: Ids) -> tuple[Ids, Ids, NDArray[np.int32]]:
        """Returns (the number of tokens that each slot lists, their ids slot after slot, the times each was
        generated)."""
        lengths = self._lengths[slots]
        ids = self._pool[self._places(slots)]
        return lengths, ids, self._generated[slots.repeat(lengths), ids] - 1

    def _places(self, slots: Ids) -> Ids:
        """The pool indexes of all tokens that these slots list, slot after slot."""
        lengths = self._lengths[slots]
        before: Ids = lengths.cumsum() - lengths
        places: Ids = np.arange(lengths.sum()) + (self._starts[slots] - before).repeat(lengths)
        return places

    def _move(self, slots: Ids, rooms: Ids) -> None:
        """Move the lists of these slots to new places of the given capacities."""
        more = int(rooms.sum())
        if self._end + more > len(self._pool):
            self._close_gaps(more)
        listed = self._pool[self._places(slots)]
        self._starts[slots] = self._end + rooms.cumsum() - rooms
        self._rooms[slots] = rooms
        self._pool[self._places(slots)] = listed
        self._end += more

    def _close_gaps(self, more: int) -> None:
        """Copy the lists without gaps into a new pool that has room for `more` and is twice as large as needed."""
        every = np.arange(len(self._rooms))
        listed = self._pool[self._places(every)]
        self._starts = self._rooms.cumsum() - self._rooms
        self._end = int(self._rooms.sum())
        self._pool = np.zeros(2 * (self._end + more), np.int64)
        self._pool[self._places(every)] = listed


def _room(lengths: Ids) -> Ids:
    """The capacities for lists that have that many tokens now."""
    rooms: Ids = np.maximum(_ROOM, lengths + lengths // 2)
    return rooms
