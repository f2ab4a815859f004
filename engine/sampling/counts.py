"""How often running sequences have generated which tokens: a sparse list a slot, kept from step to step.

Sparse, because what a penalty costs then goes with the tokens of a sequence and not with the vocabulary: of 128k tokens
a context has some hundred different ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

#: Tokens that a slot's list has room for at first.
_ROOM = 256


class TokenCounts:
    """Nothing is allocated before the first `start`."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._shape = (slots, vocab_size)
        # 0: not listed; else one more than how often it was generated. Untouched pages of it take no memory.
        self._seen: NDArray[np.int32] = np.zeros((0, 0), np.int32)
        self._listed: Ids = np.zeros((0, 0), np.int64)
        self._lengths = np.zeros(slots, np.int64)

    def start(self, slot: int, prompt: Ids, output: Ids) -> None:
        """Count anew what stands in a slot. Tokens of `prompt` are listed too, as generated 0 times."""
        if not len(self._seen):
            self._seen = np.zeros(self._shape, np.int32)
            self._listed = np.zeros((self._shape[0], _ROOM), np.int64)
        self._seen[slot, self._listed[slot, : self._lengths[slot]]] = 0
        listed = np.unique(np.concatenate((prompt, output)))
        self._make_room(len(listed))
        self._listed[slot, : len(listed)] = listed
        self._lengths[slot] = len(listed)
        self._seen[slot, listed] = 1
        ids, counts = np.unique(output, return_counts=True)
        self._seen[slot, ids] += counts.astype(np.int32)

    def grow(self, slots: Ids, tokens: Ids) -> None:
        """Each of the slots, all different, has generated one token more."""
        seen = self._seen[slots, tokens]
        fresh = seen == 0
        if fresh.any():
            own = slots[fresh]
            self._make_room(int(self._lengths[own].max()) + 1)
            self._listed[own, self._lengths[own]] = tokens[fresh]
            self._lengths[own] += 1
        self._seen[slots, tokens] = np.maximum(seen, 1) + 1

    def pairs(self, slots: Ids) -> tuple[Ids, Ids, NDArray[np.int32]]:
        """(how many tokens each slot lists, their ids one slot after the other, how often each was generated)."""
        lengths = self._lengths[slots]
        owners = slots.repeat(lengths)
        places = np.arange(len(owners)) - (lengths.cumsum() - lengths).repeat(lengths)
        ids = self._listed[owners, places]
        return lengths, ids, self._seen[owners, ids] - 1

    def _make_room(self, wanted: int) -> None:
        have = self._listed.shape[1]
        if wanted > have:
            more = np.zeros((self._shape[0], max(wanted, 2 * have) - have), np.int64)
            self._listed = np.concatenate((self._listed, more), 1)
