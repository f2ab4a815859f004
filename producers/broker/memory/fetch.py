"""One FETCH: sorts by tenant what has arrived, then takes what comes first and fits; see `redis/scripts/fetch.lua`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from producers.broker.memory.message import Sent, Unusable, read
from producers.broker.memory.server import Delivery, Server
from producers.broker.values import Credit, Fetched, Rules

#: Delayed messages that come due in one call.
DUE: int = 100


@dataclass(slots=True)
class Fetch:
    """`credit` is used up as it goes: what a tier takes, it and the lower tiers lose; higher tiers may preempt it."""

    server: Server
    incarnation: str
    queues: Sequence[str]
    home: str
    rules: Rules
    seqs: list[int]
    tokens: list[int]
    blocked: int = 4
    """The best tier that has no room: it and lower ones get no more."""
    now: float = 0.0
    lists: dict[str, tuple[str, int]] = field(default_factory=dict)
    """List -> its queue and rank."""
    passed: dict[str, set[str]] = field(default_factory=dict)
    """List -> tenants that wait because their head is a suspect."""

    def run(self, uuids: Sequence[str], bite: int) -> list[Fetched]:
        server, mine = self.server, self.server.inflight[self.incarnation]
        self.now = server.clock()
        ranked = [(rank, name, queue) for queue in self.queues for name, rank in server.places(queue)]
        self.lists = {name: (queue, rank) for rank, name, queue in sorted(ranked, key=lambda one: one[0])}
        server.due(self.home, self.now, DUE)
        buried = [one for name in self.lists for one in self._sort(name, bite)]
        out, looked = [], False
        for uuid in uuids:
            if uuid not in mine:
                if not looked:
                    looked = True
                    self._note_heads(self.lists)
                chosen = self._choose(mine)
                if chosen is None:
                    break
                mine[uuid] = self._take(*chosen)
            out.append(self._given(uuid, mine[uuid]))
        return out + buried

    def _given(self, uuid: str, d: Delivery) -> Fetched:
        for rank in range(d.rank, 4):
            self.seqs[rank] -= d.seqs
            self.tokens[rank] -= d.tokens
        returns = self.server.reaped.get(d.id, 0)
        return Fetched(uuid, *self.lists[d.list], d.raw, returns > 0, 0 < returns >= self.rules.max_redeliveries)

    def _sort(self, name: str, bite: int) -> list[Fetched]:
        """So many from the front of a list; what cannot be used is dead-lettered, and answered."""
        server, buried = self.server, []
        for _ in range(min(bite, len(server.lists[name]))):
            raw = server.lists[name].pop()
            try:
                message = read(raw)
            except Unusable as why:
                server.bury(str(why), name, raw)
                buried.append(Fetched("", *self.lists[name], raw, buried=str(why)))
                continue
            number = server.returned.pop(message.id, None)
            if number is None:
                number = server.arrivals = server.arrivals + 1
            server.turns[name].place(number, message)
        return buried

    def _note_heads(self, names: Sequence[str] | dict[str, tuple[str, int]]) -> None:
        """Since when each list's head waits; later than now: the clock was set back."""
        for name in names:
            if self.server.turns[name].queues:
                self.server.unserved[name] = min(self.now, self.server.unserved.get(name, self.now))
            else:
                self.server.unserved.pop(name, None)

    def _choose(self, mine: dict[str, Delivery]) -> tuple[str, int, Sent] | None:
        """The next message: from the list of the best rank, then tier, then order, of lists that are not held up."""
        while heads := {
            name: head
            for name, (_, tier) in self.lists.items()
            if tier < self.blocked and (head := self.server.turns[name].head(self.passed.get(name, set())))
        }:
            best = min(heads, key=lambda name: (self._rank(name), self.lists[name][1]))
            number, message = heads[best]
            tier = self.lists[best][1]
            seqs, tokens = message.size(self.rules.capacity, self.rules.plain_tokens)
            if seqs > self.seqs[tier] or tokens > self.tokens[tier]:
                self.blocked = tier
            elif self._suspect(message.id) and any(self._suspect(d.id) for d in mine.values()):
                self.passed.setdefault(best, set()).add(message.tenant)
            else:
                return best, number, message
        return None

    def _rank(self, name: str) -> int:
        waited = (self.now - self.server.unserved[name]) / (self.rules.ageing * 1000)
        return self.lists[name][1] - math.floor(waited)

    def _suspect(self, task_id: str) -> bool:
        """One more return, and it is condemned."""
        return 0 < self.server.reaped.get(task_id, 0) >= self.rules.max_redeliveries - 1

    def _take(self, name: str, number: int, message: Sent) -> Delivery:
        server = self.server
        seqs, tokens = message.size(self.rules.capacity, self.rules.plain_tokens)
        charge, weight = max(tokens, 1), server.weights.get(message.tenant, 1.0)
        server.turns[name].serve(message.tenant, number, charge / weight)
        server.unserved[name] = self.now
        server.taken += 1
        server.taken_tokens += tokens
        self._note_heads([name])
        rank = self.lists[name][1]
        return Delivery(
            server.taken, name, message.id, message.raw, rank, seqs, tokens, number, message.tenant, charge, weight
        )


def fetch(
    server: Server,
    incarnation: str,
    queues: Sequence[str],
    uuids: Sequence[str],
    credit: Credit,
    rules: Rules,
    bite: int,
    home: str | None = None,
) -> list[Fetched] | None:
    """The same as `producers.broker.base.Consumer.fetch`."""
    with server.lock:
        if not server.lives(incarnation):
            return None
        room = (list(credit.seqs), list(credit.tokens))
        return Fetch(server, incarnation, queues, home or queues[0], rules, *room).run(uuids, bite)
