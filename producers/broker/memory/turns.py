"""Turns among tenants within one list: virtual token counters, see `redis/scripts/_fair.lua`."""

from __future__ import annotations

from dataclasses import dataclass, field

from producers.broker.memory.message import Sent


@dataclass(slots=True)
class Turns:
    """A list's sorted messages: each tenant's messages by number of arrival, and its served tokens by weight.

    `served` has tenants with waiting messages. `rested` has tenants without, that were served more than the least of
    the others.
    """

    queues: dict[str, dict[int, Sent]] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    rested: dict[str, float] = field(default_factory=dict)

    def place(self, number: int, message: Sent) -> None:
        tenant = message.tenant
        if tenant not in self.served:
            self.served[tenant] = max([self.rested.pop(tenant, 0.0), *self._least()])
        self.queues.setdefault(tenant, {})[number] = message

    def serve(self, tenant: str, number: int, charge: float) -> None:
        """It was taken, and its tenant is served so much more."""
        del self.queues[tenant][number]
        self.served[tenant] += charge
        if not self.queues[tenant]:
            del self.queues[tenant]
            self.rested[tenant] = self.served.pop(tenant)
        self._forget()

    def correct(self, tenant: str, more: float) -> None:
        """Set right what it was charged. Nobody comes to stand better by that than whoever was served least."""
        for some in (self.served, self.rested):
            if tenant in some:
                least = min([some[tenant], *(self._least() or [0.0])])
                some[tenant] = max(least, some[tenant] + more)
        self._forget()

    def take_last(self, count: int) -> list[tuple[int, Sent]]:
        """The `count` that arrived last, by number; nobody is charged."""
        last = sorted(self.messages().items(), key=lambda one: one[0])[-count:] if count else []
        for number, message in last:
            del self.queues[message.tenant][number]
            if not self.queues[message.tenant]:
                del self.queues[message.tenant], self.served[message.tenant]
        if not self.queues:
            self.rested.clear()
        return last

    def head(self, passed: set[str]) -> tuple[int, Sent] | None:
        """The oldest of the tenant that was served least, of those that are not passed over."""
        waiting = [tenant for tenant in self.queues if tenant not in passed]
        if not waiting:
            return None
        first = min(waiting, key=lambda tenant: (self.served[tenant], tenant.encode(errors="surrogateescape")))
        return min(self.queues[first].items(), key=lambda one: one[0])

    def messages(self) -> dict[int, Sent]:
        return {number: sent for queue in self.queues.values() for number, sent in queue.items()}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def _least(self) -> list[float]:
        return [min(self.served.values())] if self.served else []

    def _forget(self) -> None:
        self.rested = {t: n for t, n in self.rested.items() if any(n > least for least in self._least())}
