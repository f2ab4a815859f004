"""What the broker's scripts must do, in plain Python: lists, turns, deliveries, credit, ageing, suspects, dead letters.

A list's last element is its front, as in Redis. Time is counted in ages: how many `ageing` periods a list's head has
waited unserved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Sent(NamedTuple):
    """A message: `poison` is the reason why it cannot be decoded. Sizes as its sender says them, None where unsaid."""

    raw: bytes
    id: str = ""
    poison: str = ""
    sized: bool = True
    seqs: int | None = None
    tokens: int | None = None
    tenant: str = ""


@dataclass(slots=True)
class Turns:
    """What was sorted of one list: per tenant its messages by number of arrival, and what it was served by its weight.

    `served` has those of whom something waits; `rested` those of whom nothing does and who were served more than the
    least of them.
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
        del self.queues[tenant][number]
        self.served[tenant] += charge
        if not self.queues[tenant]:
            del self.queues[tenant]
            self.rested[tenant] = self.served.pop(tenant)
        self._forget()

    def correct(self, tenant: str, more: float) -> None:
        for some in (self.served, self.rested):
            if tenant in some:
                least = min([some[tenant], *(self._least() or [0.0])])
                some[tenant] = max(least, some[tenant] + more)
        self._forget()

    def order(self) -> list[str]:
        return sorted(self.queues, key=lambda tenant: (self.served[tenant], tenant.encode()))

    def messages(self) -> dict[int, Sent]:
        return {number: sent for queue in self.queues.values() for number, sent in queue.items()}

    def _least(self) -> list[float]:
        return [min(self.served.values())] if self.served else []

    def _forget(self) -> None:
        self.rested = {t: n for t, n in self.rested.items() if any(n > least for least in self._least())}


@dataclass(slots=True)
class Delivery:
    uuid: str
    list: str
    message: Sent
    order: int
    rank: int
    seqs: int
    tokens: int
    number: int
    charge: int
    weight: float


@dataclass(slots=True)
class Delayed:
    due: int | None  # None: not yet; else its place among those that are
    uuid: str
    list: str
    message: Sent


@dataclass(slots=True)
class Broker:
    ranks: dict[str, int]
    capacity: tuple[int, int]
    plain_tokens: int
    limit: int
    bite: int
    lists: dict[str, list[Sent]] = field(default_factory=dict)
    inflight: dict[str, dict[str, Delivery]] = field(default_factory=dict)
    delayed: list[Delayed] = field(default_factory=list)
    dead: list[tuple[str, str, bytes]] = field(default_factory=list)
    reaped: dict[str, int] = field(default_factory=dict)
    #: Of tasks whose record is on this server, too: whether it is settled.
    records: dict[str, bool] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    #: Incarnations that REAP knows of, with the queue of each.
    listed: dict[str, str] = field(default_factory=dict)
    fetched: int = 0
    turns: dict[str, Turns] = field(default_factory=dict)
    returned: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    arrivals: int = 0

    def __post_init__(self) -> None:
        self.lists = {name: [] for name in self.ranks}
        self.turns = {name: Turns() for name in self.ranks}

    # ---- FETCH -----------------------------------------------------------------------------------------------

    def fetch(
        self, inc: str, uuids: list[str], seqs: list[int], tokens: list[int]
    ) -> list[tuple[str, str, bytes, str]] | None:
        if inc not in self.live:
            return None
        for late in sorted((d for d in self.delayed if d.due is not None), key=lambda d: -(d.due or 0)):
            self.lists[late.list].append(late.message)
            self.delayed.remove(late)
        room, out, mine = Room(seqs[:], tokens[:]), [], self.inflight.setdefault(inc, {})
        passed: set[tuple[str, str]] = set()
        looked, dead = False, len(self.dead)
        for name in self.lists:
            self._sort(name)
        for uuid in uuids:
            if uuid not in mine:
                if not looked:
                    looked = True
                    for name in self.lists:
                        self._head(name)
                chosen = self._choose(mine, room, passed)
                if chosen is None:
                    break
                name, number, message = chosen
                seqs_, tokens_ = self.size(message)
                charge, weight = max(tokens_, 1), self.weights.get(message.tenant, 1.0)
                self.turns[name].serve(message.tenant, number, charge / weight)
                self.ages[name] = 0
                self.fetched += 1
                rank = self.ranks[name]
                mine[uuid] = Delivery(uuid, name, message, self.fetched, rank, seqs_, tokens_, number, charge, weight)
                room.take(mine[uuid])
                self._head(name)
            else:
                room.take(mine[uuid])
            d = mine[uuid]
            n = self.reaped.get(d.message.id, 0)
            out.append((uuid, d.list, d.message.raw, "condemned" if n >= self.limit else str(n)))
        return out + [("", name, raw, reason) for reason, name, raw in self.dead[dead:]]

    def _choose(
        self, mine: dict[str, Delivery], room: Room, passed: set[tuple[str, str]]
    ) -> tuple[str, int, Sent] | None:
        """From the list of the best rank, then tier, then the order of the lists, among those not held up: the oldest
        of the tenant that was served least, of those who are not passed over."""
        while True:
            heads = {}
            for name, turns in self.turns.items():
                waiting = [tenant for tenant in turns.order() if (name, tenant) not in passed]
                if waiting and self.ranks[name] < room.blocked:
                    heads[name] = min(turns.queues[waiting[0]].items(), key=lambda item: item[0])
            if not heads:
                return None
            best = min(heads, key=lambda n: (self.ranks[n] - self.ages[n], self.ranks[n]))
            number, head = heads[best]
            if not room.fits(self.ranks[best], *self.size(head)):
                room.blocked = self.ranks[best]
            elif self._suspect(head) and any(self._suspect(d.message) for d in mine.values()):
                passed.add((best, head.tenant))
            else:
                return best, number, head

    def _sort(self, name: str) -> None:
        """By tenant, so many from the front; what cannot be decoded is dead-lettered."""
        waiting = self.lists[name]
        for _ in range(min(self.bite, len(waiting))):
            message = waiting.pop()
            if message.poison:
                self.dead.append((message.poison, name, message.raw))
                continue
            number = self.returned.pop(message.id, None)
            if number is None:
                number = self.arrivals = self.arrivals + 1
            self.turns[name].place(number, message)

    def _head(self, name: str) -> None:
        """Note since when the head waits."""
        if self.turns[name].queues:
            self.ages[name] = max(0, self.ages.get(name, 0))  # below 0: the clock was set back
        else:
            self.ages.pop(name, None)

    def _suspect(self, message: Sent) -> bool:
        return 0 < self.reaped.get(message.id, 0) >= self.limit - 1

    def size(self, message: Sent) -> tuple[int, int]:
        if not message.sized:
            return 0, 0
        return min(message.seqs or 1, self.capacity[0]), min(message.tokens or self.plain_tokens, self.capacity[1])

    # ---- ACK, BACK, REAP -------------------------------------------------------------------------------------

    def ack(self, inc: str, uuid: str, reason: str, used: int, settled: bool) -> int:
        d = self.inflight.get(inc, {}).get(uuid)
        if d is None:
            return 0
        if settled and self.records.get(d.message.id, True) is False:
            return -1
        del self.inflight[inc][uuid]
        self.reaped.pop(d.message.id, None)
        self._correct(d, max(1, used))
        if reason:
            self.dead.append((reason, d.list, d.message.raw))
        return 1

    def back(self, inc: str, uuid: str, delay: bool) -> int:
        d = self.inflight.get(inc, {}).pop(uuid, None)
        if d is None:
            return 0
        if delay:
            self.delayed.append(Delayed(None, uuid, d.list, d.message))
        else:
            self.lists[d.list].append(d.message)
        self._returns(d)
        return 1

    def reap(self, inc: str) -> int:
        if inc in self.live:
            return -1
        self.listed.pop(inc, None)
        gone = sorted(self.inflight.pop(inc, {}).values(), key=lambda d: -d.order)
        for d in gone:
            self.lists[d.list].append(d.message)
            self.reaped[d.message.id] = self.reaped.get(d.message.id, 0) + 1
            self._returns(d)
        return len(gone)

    def _returns(self, d: Delivery) -> None:
        self.returned[d.message.id] = d.number
        self._correct(d, 0)

    def _correct(self, d: Delivery, used: int) -> None:
        self.turns[d.list].correct(d.message.tenant, (used - d.charge) / d.weight)

    # ---- LEASE, STRAYS ---------------------------------------------------------------------------------------

    def lease(self, inc: str, take: bool, queue: str | None) -> int:
        """Renewed where it is there; taken anew, and listed where there is a list."""
        if not take and inc not in self.live:
            return 0
        self.live.add(inc)
        if take and queue is not None:
            self.listed[inc] = queue
        return 1

    def strays(self, inc: str, held: set[str]) -> dict[str, str]:
        """Task ids of what is in flight of an incarnation, and not held."""
        return {uuid: d.message.id for uuid, d in self.inflight.get(inc, {}).items() if uuid not in held}

    # ---- RECALL, ADOPT ----------------------------------------------------------------------------------------------

    def unsort(self, queue: list[str], count: int) -> int:
        """The last of each list first; `queue` names its lists."""
        moved = 0
        for name in queue:
            if moved == count:
                break
            turns, returned = self.turns[name], self._take_returned(name)
            last = sorted(turns.messages().items(), key=lambda one: one[0])[moved - count :]
            for number, message in last:
                del turns.queues[message.tenant][number]
                if not turns.queues[message.tenant]:
                    del turns.queues[message.tenant], turns.served[message.tenant]
            moved += len(last)
            among = [(n, message) for n, message in returned if last and n > last[0][0]]
            for _, message in among:
                self.returned.pop(message.id, None)
            back = [message for _, message in sorted([*last, *among], key=lambda one: one[0])]
            ahead = [message for n, message in returned if not last or n <= last[0][0]]
            self.lists[name] += [*reversed(back), *reversed(ahead)]
            if not turns.queues:
                turns.rested.clear()
        return moved

    def recall(self, queue: list[str], takers: list[str], count: int) -> int:
        """Where nobody lives, of those that are listed, who takes from the queue."""
        if any(inc in self.live and pool in takers for inc, pool in self.listed.items()):
            return -1
        return self.unsort(queue, count)

    def _take_returned(self, name: str) -> list[tuple[int, Sent]]:
        """What came back, and where it stood: the front first."""
        taken = []
        while self.lists[name] and self.lists[name][-1].id in self.returned:
            message = self.lists[name].pop()
            taken.append((self.returned[message.id], message))
        return taken

    def adopt(self, source: list[str], target: list[str]) -> int:
        """What waits. Of what is held back, a test has none there."""
        self.unsort(source, len(source) * 10**6)
        moved = 0
        for here, there in zip(source, target, strict=True):
            moved += len(self.lists[here])
            self.lists[there] += self.lists[here]
            self.lists[here].clear()
        return moved


@dataclass(slots=True)
class Room:
    """Credit per tier. What a tier takes, it and the lower tiers lose; higher tiers may preempt it."""

    seqs: list[int]
    tokens: list[int]
    blocked: int = 4

    def fits(self, rank: int, seqs: int, tokens: int) -> bool:
        return seqs <= self.seqs[rank] and tokens <= self.tokens[rank]

    def take(self, d: Delivery) -> None:
        for rank in range(d.rank, 4):
            self.seqs[rank] -= d.seqs
            self.tokens[rank] -= d.tokens
