"""Scheduling order: tiers, ageing, tenants' shares, and the queue of waiting sequences.

A sequence's effective tier is its request's tier less one for each `ageing_s` seconds that it has waited in all, down
to 0. It only ever falls, and is kept while the sequence runs. Within a tier, the sequence whose tenant was served least
goes first (`Shares`), then the request that arrived first.

Ageing moves a sequence forward in the queue and shields it once it runs. To preempt others, a sequence has only its
request's tier, and no share. So a sequence aged to tier 0 will in time be the first in the queue. A fresh request of a
high tier still displaces lower ones at once. No two sequences can go on displacing each other.

In the batch, sequences are ordered by what their tenants had been served at their first admission. If memory runs out,
the last in that order is preempted: of the tenants served most, the sequence that arrived last.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from engine.sequence import Account, Sequence

TIERS = 4

#: The most steps in a row that exclude worse tiers for prompts of the best tier, and the number of ordinary steps that
#: earn one more.
EXCLUSIVE_STEPS, EXCLUSIVE_INTERVAL = 3, 3

Key = tuple[int, float, float, int]


def effective_tier(tier: int, waited: float, ageing_s: float) -> int:
    """The tier less one for each whole `ageing_s` seconds of waiting, at least 0."""
    return max(0, tier - max(0, int(waited / ageing_s)))


def running_key(seq: Sequence) -> Key:
    """The sort key of the batch. The last sequence is the first to be preempted."""
    return (seq.effective_tier, seq.tag, seq.request.arrival, seq.serial)


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheduler's settings that are no matter of room."""

    ageing_s: float = 30.0
    """A waiting request rises by one tier for each `ageing_s` seconds."""
    enable_prefix_caching: bool = True
    seed: int | None = None
    """The source of seeds for requests that have none."""
    exclusive: bool = False
    """Whether steps with a prompt of the best tier exclude worse tiers: at most EXCLUSIVE_STEPS in a row, and in the
    long run one step of 1 + EXCLUSIVE_INTERVAL."""
    batches: int = 1
    """The steps of disjoint sequences that are to be in flight: of those that decode, each step takes such a part."""


def is_priority(seq: Sequence) -> bool:
    """Whether the request's own tier is the best one. Ageing does not count: it takes far longer than a step."""
    return seq.request.tier == 0


class WaitingQueue:
    """The waiting sequences, ordered by effective tier, then the tokens served to their tenants, then arrival.

    A sequence that never ran has waited since its arrival, so a tenant's order within a tier never changes: each tenant
    has one sorted list in each tier, and only the heads are compared. Preempted sequences have waited less than that.
    They are few, and each is compared.
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
        """The first sequence in order among requests of a tier better than `below`, as (effective tier, sequence)."""
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
        """The sort key. An aged sequence counts on its tenant's account in the tier that it has reached."""
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


class Shares:
    """The tenants' accounts: each tier counts the tokens served to a tenant, divided by its weight. The tenant served
    least goes next. An account without sequences is dropped once it is not above its tier's clock.

    These are virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), with the
    clock of start-time fair queueing (Goyal, Vin, Cheng, 1996) for new tenants. A tier's clock is the count of the
    tenant that was admitted last, at that time. A tenant that comes begins at the clock, unless its count is higher, so
    an idle tenant saves nothing up. All waiting tenants' counts are within `[clock, clock + U]`. U is what one tenant's
    sequences can add once they are admitted: at most max_num_seqs times the longest sequence, divided by the least
    weight. Over any time, the counts of two tenants that both wait differ by at most 2 U.

    The count includes the prompt's tokens at admission, without those whose K/V are cached, and each generated token.
    Tokens that are computed again after a preemption are not counted.
    """

    def __init__(self, tiers: int) -> None:
        self._accounts: list[dict[str, Account]] = [{} for _ in range(tiers)]
        self._clocks = [0.0] * tiers
        self._open_requests = [0] * tiers
        self._idle: list[list[tuple[float, str]]] = [[] for _ in range(tiers)]  # heaps

    def served(self, tier: int, tenant: str) -> float:
        account = self._accounts[tier].get(tenant)
        return self._clocks[tier] if account is None else account.served

    def open(self, tier: int, tenant: str) -> Account:
        """The tenant's account, for one more sequence."""
        account = self._accounts[tier].get(tenant)
        if account is None:
            account = self._accounts[tier][tenant] = Account(tenant, tier, self._clocks[tier])
        elif account.open_requests == 0:
            account.served = max(account.served, self._clocks[tier])
        account.open_requests += 1
        self._open_requests[tier] += 1
        return account

    def close(self, account: Account) -> None:
        """Remove one sequence from an account."""
        tier = account.tier
        account.open_requests -= 1
        self._open_requests[tier] -= 1
        if self._open_requests[tier] == 0:
            self._accounts[tier].clear()
            self._idle[tier].clear()
            self._clocks[tier] = 0.0
        elif account.open_requests == 0:
            heapq.heappush(self._idle[tier], (account.served, account.tenant))
            self._forget(tier)

    def admitted(self, account: Account) -> None:
        """Advance the tier's clock to the account, whose sequence is admitted. Call it before the sequence is
        charged."""
        self._clocks[account.tier] = max(self._clocks[account.tier], account.served)
        self._forget(account.tier)

    def _forget(self, tier: int) -> None:
        idle, clock = self._idle[tier], self._clocks[tier]
        while idle and idle[0][0] <= clock:
            _, tenant = heapq.heappop(idle)
            account = self._accounts[tier].get(tenant)
            if account is not None and account.open_requests == 0 and account.served <= clock:
                del self._accounts[tier][tenant]

    def __len__(self) -> int:
        """The number of accounts."""
        return sum(map(len, self._accounts))
