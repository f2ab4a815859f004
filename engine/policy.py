"""Who goes first: tiers, ageing and the queue of those who wait.

A sequence's effective tier is its request's tier less one for each `ageing_s` seconds that it has waited in all,
down to 0. It only ever falls, and is kept while the sequence runs. Of equals, the request that arrived first goes
first. Ageing moves a sequence forward in the queue and shields it once it runs; to put others out of the batch it
has only the tier it came with. So whoever ages to 0 is in time the first in the queue, a fresh request of a high
tier still displaces lower ones at once, and no two sequences can go on displacing each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from engine.request import Sequence

TIERS = 4

Key = tuple[int, float, int]


def effective_tier(tier: int, waited: float, ageing_s: float) -> int:
    """Whole tiers, 0 at the least."""
    return max(0, tier - max(0, int(waited / ageing_s)))


def running_key(seq: Sequence) -> Key:
    """The order of the batch: its last is the first to be put out."""
    return (seq.effective_tier, seq.request.arrival, seq.serial)


class WaitingQueue:
    """Sequences that wait, in the order of their effective tier, then arrival.

    Those that never ran have waited since they arrived, so within a tier the order of arrival is their order for
    ever: one sorted list for each tier, of which only the heads are compared. Those that were put out of the batch
    have waited less than that; they are few, and each is looked at.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._fresh: list[list[Sequence]] = [[] for _ in range(TIERS)]
        self._preempted: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return sum(map(len, self._fresh)) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._fresh, self._preempted.values())

    def push(self, seq: Sequence) -> None:
        if seq.preempted:
            self._preempted[seq.serial] = seq
        else:
            insort(self._fresh[seq.request.tier], seq, key=_arrival_key)

    def remove(self, seq: Sequence) -> None:
        if seq.preempted:
            del self._preempted[seq.serial]
        else:
            fresh = self._fresh[seq.request.tier]
            del fresh[bisect_left(fresh, _arrival_key(seq), key=_arrival_key)]

    def preempted(self) -> list[Sequence]:
        return list(self._preempted.values())

    def first(self, now: float, below: int = TIERS) -> tuple[int, Sequence] | None:
        """(effective tier, sequence) of the first in order among requests of a tier better than `below`."""
        heads = [fresh[0] for fresh in self._fresh[:below] if fresh]
        heads += [seq for seq in self._preempted.values() if seq.request.tier < below]
        if not heads:
            return None
        seq = min(heads, key=lambda seq: (self._tier(seq, now), *_arrival_key(seq)))
        return self._tier(seq, now), seq

    def _tier(self, seq: Sequence, now: float) -> int:
        return effective_tier(seq.request.tier, seq.waited + now - seq.queued_at, self._ageing_s)


def _arrival_key(seq: Sequence) -> tuple[float, int]:
    return (seq.request.arrival, seq.serial)
