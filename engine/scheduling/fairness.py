"""Fairness between tenants: each tier counts the tokens served to a tenant, divided by its weight. The tenant served
least goes next.

These are virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), with the clock
of start-time fair queueing (Goyal, Vin, Cheng, 1996) for new tenants. A tier's clock is the count of the tenant that
was admitted last, at that time. A tenant that comes begins at the clock, unless its count is higher, so an idle tenant
saves nothing up. All waiting tenants' counts are within `[clock, clock + U]`. U is what one tenant's sequences can add
once they are admitted: at most max_num_seqs times the longest sequence, divided by the least weight. Over any time, the
counts of two tenants that both wait differ by at most 2 U.

The count includes the prompt's tokens at admission, without those whose K/V are cached, and each generated token.
Tokens that are computed again after a preemption are not counted.
"""

from __future__ import annotations

import heapq

from engine.sequence import Account


class Shares:
    """The tenants' accounts. An account without sequences is dropped once it is not above its tier's clock."""

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
