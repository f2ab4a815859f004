"""Who goes first: tiers, ageing, shares, and the queue of those who wait.

A sequence's effective tier is its request's tier less one for each `ageing_s` seconds that it has waited in all,
down to 0. It only ever falls, and is kept while the sequence runs. Of equals, the one whose tenant was served least in
that tier goes first (`shares.py`); then the request that arrived first. Ageing moves a sequence forward in the queue
and shields it once it runs; to put others out of the batch it has only the tier it came with, and no share. So whoever
ages to 0 is in time the first in the queue, a fresh request of a high tier still displaces lower ones at once, and no
two sequences can go on displacing each other.

In the batch, the order is that of what a sequence's tenant had been served when it was first admitted: who is put out
for want of memory is of those whose tenants had most, and the last to come.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from engine.scheduling.fairness import Shares
from engine.sequence import Sequence

TIERS = 4

#: Steps in a row that prompts of the best tier may have for it alone, and how many steps of all there are for one more.
APART, APART_AGAIN = 3, 3

Key = tuple[int, float, float, int]


def effective_tier(tier: int, waited: float, ageing_s: float) -> int:
    """Whole tiers, 0 at the least."""
    return max(0, tier - max(0, int(waited / ageing_s)))


def running_key(seq: Sequence) -> Key:
    """The order of the batch: its last is the first to be put out."""
    return (seq.effective_tier, seq.tag, seq.request.arrival, seq.serial)


@dataclass(frozen=True, slots=True)
class Hurry:
    """What is done so that prompts of the best tier wait for few tokens of worse ones."""

    unhurried_tokens: int | None = None
    """Tokens of a step that no such prompt has a part in, at most; None: as many as there may be in any."""
    apart: bool = False
    """Whether such a prompt has steps without worse tiers: APART in a row at most, and in the long run one of
    1 + APART_AGAIN."""


NO_HURRY = Hurry()


def hurries(seq: Sequence) -> bool:
    """By what it asked for: whoever reached the best tier by ageing has waited for longer than a step."""
    return seq.request.tier == 0


class WaitingQueue:
    """Sequences that wait, in the order of their effective tier, what their tenant was served, and arrival.

    Those that never ran have waited since they arrived, so within a tier the order of arrival is their tenant's for
    ever: one sorted list for each tenant in each tier, of which only the heads are compared. Those that were put out of
    the batch have waited less than that; they are few, and each is looked at.
    """

    def __init__(self, ageing_s: float) -> None:
        self.shares = Shares(TIERS)
        self._ageing_s = ageing_s
        self._fresh: list[dict[str, list[Sequence]]] = [{} for _ in range(TIERS)]
        self._preempted: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return sum(len(fresh) for tier in self._fresh for fresh in tier.values()) + len(self._preempted)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*(fresh for tier in self._fresh for fresh in tier.values()), self._preempted.values())

    def push(self, seq: Sequence) -> None:
        request = seq.request
        if seq.preempted:
            self._preempted[seq.serial] = seq
        else:
            seq.account = self.shares.open(request.tier, request.tenant)
            insort(self._fresh[request.tier].setdefault(request.tenant, []), seq, key=_arrival_key)

    def remove(self, seq: Sequence) -> None:
        request = seq.request
        if seq.preempted:
            del self._preempted[seq.serial]
        else:
            fresh = self._fresh[request.tier][request.tenant]
            del fresh[bisect_left(fresh, _arrival_key(seq), key=_arrival_key)]
            if not fresh:
                del self._fresh[request.tier][request.tenant]

    def preempted(self) -> list[Sequence]:
        return list(self._preempted.values())

    def first(self, now: float, below: int = TIERS) -> tuple[int, Sequence] | None:
        """(effective tier, sequence) of the first in order among requests of a tier better than `below`."""
        heads = [fresh[0] for tier in self._fresh[:below] for fresh in tier.values()]
        heads += [seq for seq in self._preempted.values() if seq.request.tier < below]
        if not heads:
            return None
        if len(heads) == 1:
            return self._tier(heads[0], now), heads[0]
        key, seq = min(((self._key(seq, now), seq) for seq in heads), key=_first)
        return key[0], seq

    def _tier(self, seq: Sequence, now: float) -> int:
        return effective_tier(seq.request.tier, seq.waited + now - seq.queued_at, self._ageing_s)

    def _key(self, seq: Sequence, now: float) -> Key:
        """An aged sequence is its tenant's in the tier that it has reached."""
        tier, account = self._tier(seq, now), seq.account
        if account is not None and account.tier == tier:
            served = account.served
        else:
            served = self.shares.served(tier, seq.request.tenant)
        return (tier, served, *_arrival_key(seq))


def _first(item: tuple[Key, Sequence]) -> Key:
    return item[0]


def _arrival_key(seq: Sequence) -> tuple[float, int]:
    return (seq.request.arrival, seq.serial)
