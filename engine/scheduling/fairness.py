"""What each tenant was served, tier by tier, in tokens by weight: of those who wait, the least served is next.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024), with the clock of
start-time fair queueing (Goyal, Vin, Cheng, 1996) for those who come: a tier's clock is what the tenant admitted last
had been served by then, and who comes begins there, unless it was served more before. So a rest saves nothing up, and
all who wait are within `[clock, clock + U]`, where U is what one tenant's sequences can add once they are admitted: at
most max_num_seqs times the longest sequence, divided by the least weight. What two tenants who both wait are served by
their weights, over any time, differs by 2 U at most.

Counted are the tokens of a prompt when it is admitted, without those whose K/V are cached, and each token generated.
What is computed again, after a sequence was put out of the batch, is nobody's.
"""

from __future__ import annotations

import heapq

from engine.sequence import Account


class Shares:
    """The accounts. One on which nothing waits or runs is forgotten once it is not above its tier's clock."""

    def __init__(self, tiers: int) -> None:
        self._accounts: list[dict[str, Account]] = [{} for _ in range(tiers)]
        self._clocks = [0.0] * tiers
        self._held = [0] * tiers
        self._rested: list[list[tuple[float, str]]] = [[] for _ in range(tiers)]  # heaps

    def served(self, tier: int, tenant: str) -> float:
        account = self._accounts[tier].get(tenant)
        return self._clocks[tier] if account is None else account.served

    def open(self, tier: int, tenant: str) -> Account:
        """For one more sequence."""
        account = self._accounts[tier].get(tenant)
        if account is None:
            account = self._accounts[tier][tenant] = Account(tenant, tier, self._clocks[tier])
        elif account.held == 0:
            account.served = max(account.served, self._clocks[tier])
        account.held += 1
        self._held[tier] += 1
        return account

    def close(self, account: Account) -> None:
        """A sequence less."""
        tier = account.tier
        account.held -= 1
        self._held[tier] -= 1
        if self._held[tier] == 0:
            self._accounts[tier].clear()
            self._rested[tier].clear()
            self._clocks[tier] = 0.0
        elif account.held == 0:
            heapq.heappush(self._rested[tier], (account.served, account.tenant))
            self._forget(tier)

    def admitted(self, account: Account) -> None:
        """It is an account's turn: before its sequence is paid for."""
        self._clocks[account.tier] = max(self._clocks[account.tier], account.served)
        self._forget(account.tier)

    def _forget(self, tier: int) -> None:
        rested, clock = self._rested[tier], self._clocks[tier]
        while rested and rested[0][0] <= clock:
            _, tenant = heapq.heappop(rested)
            account = self._accounts[tier].get(tenant)
            if account is not None and account.held == 0 and account.served <= clock:
                del self._accounts[tier][tenant]

    def __len__(self) -> int:
        """Accounts that are kept."""
        return sum(map(len, self._accounts))
