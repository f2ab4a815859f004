"""What the broker's scripts must do, in plain Python: lists, deliveries, credit, ageing, suspects, dead letters.

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


@dataclass(slots=True)
class Delivery:
    uuid: str
    list: str
    message: Sent
    order: int
    rank: int
    seqs: int
    tokens: int


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
    lists: dict[str, list[Sent]] = field(default_factory=dict)
    inflight: dict[str, dict[str, Delivery]] = field(default_factory=dict)
    delayed: list[Delayed] = field(default_factory=list)
    dead: list[tuple[str, str, bytes]] = field(default_factory=list)
    reaped: dict[str, int] = field(default_factory=dict)
    ages: dict[str, int] = field(default_factory=dict)
    live: set[str] = field(default_factory=set)
    fetched: int = 0

    def __post_init__(self) -> None:
        self.lists = {name: [] for name in self.ranks}

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
        skipped: set[str] = set()
        looked, dead = False, len(self.dead)
        for uuid in uuids:
            if uuid not in mine:
                if not looked:
                    looked = True
                    for name in self.lists:
                        self._head(name)
                chosen = self._choose(mine, room, skipped)
                if chosen is None:
                    break
                message = self.lists[chosen].pop()
                self.ages[chosen] = 0
                self.fetched += 1
                mine[uuid] = Delivery(uuid, chosen, message, self.fetched, self.ranks[chosen], *self.size(message))
                room.take(mine[uuid])
                self._head(chosen)
            else:
                room.take(mine[uuid])
            d = mine[uuid]
            n = self.reaped.get(d.message.id, 0)
            out.append((uuid, d.list, d.message.raw, "condemned" if n >= self.limit else str(n)))
        return out + [("", name, raw, reason) for reason, name, raw in self.dead[dead:]]

    def _choose(self, mine: dict[str, Delivery], room: Room, skipped: set[str]) -> str | None:
        """The list to take from: the best rank, then tier, then the order of the lists, among those not held up."""
        while True:
            names = [n for n in self.lists if self.lists[n] and n not in skipped and self.ranks[n] < room.blocked]
            if not names:
                return None
            best = min(names, key=lambda n: (self.ranks[n] - self.ages[n], self.ranks[n]))
            head = self.lists[best][-1]
            if not room.fits(self.ranks[best], *self.size(head)):
                room.blocked = self.ranks[best]
            elif self._suspect(head) and any(self._suspect(d.message) for d in mine.values()):
                skipped.add(best)
            else:
                return best

    def _head(self, name: str) -> None:
        """Dead-letter what stands at the front and cannot be decoded; note since when the head waits."""
        waiting = self.lists[name]
        while waiting and waiting[-1].poison:
            poison = waiting.pop()
            self.dead.append((poison.poison, name, poison.raw))
        if waiting:
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

    def ack(self, inc: str, uuid: str, reason: str) -> int:
        d = self.inflight.get(inc, {}).pop(uuid, None)
        if d is None:
            return 0
        self.reaped.pop(d.message.id, None)
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
        return 1

    def reap(self, inc: str) -> int:
        if inc in self.live:
            return -1
        gone = sorted(self.inflight.pop(inc, {}).values(), key=lambda d: -d.order)
        for d in gone:
            self.lists[d.list].append(d.message)
            self.reaped[d.message.id] = self.reaped.get(d.message.id, 0) + 1
        return len(gone)


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
