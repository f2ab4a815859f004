"""Received messages that are not put down yet, and the choice of the next: the turns of the broker in memory.

Of a FIFO queue's group only the first message may be chosen. The others wait for it here, since SQS shows none of a
group of which one is in flight: once it is acknowledged, the next may be chosen; if it goes back, they all do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from producers.broker.memory.fetch import Fetch
from producers.broker.memory.server import Delivery, Server
from producers.broker.sqs import names
from producers.broker.sqs.hold.held import Held
from producers.broker.values import Credit, Fetched, Rules
from producers.contract.keys import TIERS


def places(queue: str) -> list[tuple[str, int]]:
    """The lists of a queue, each with its tier's rank, best tier first."""
    return [(name, TIERS[tier][0]) for name, tier in names.lists(queue)]


class Buffer:
    """Not thread-safe: its `Hold` has a lock for it."""

    def __init__(self, queues: Sequence[str], fifo: bool) -> None:
        self._queues, self._fifo = list(queues), fifo
        self.server = Server(places=places)
        self._waiting: dict[int, Held] = {}
        self._groups: dict[tuple[str, str], deque[Held]] = {}

    def place(self, held: Held, returns: int, rules: Rules) -> None:
        """It may be chosen. `returns`: its redeliveries whose worker died."""
        assert held.sent is not None
        held.seqs, held.tokens = held.sent.size(rules.capacity, rules.plain_tokens)
        if returns:
            self.server.reaped[held.id] = returns
        if self._fifo and held.group:
            group = self._groups.setdefault((held.list, held.group), deque())
            group.append(held)
            if group[0] is not held:
                return
        self._open(held)

    def _open(self, held: Held) -> None:
        assert held.sent is not None
        self._waiting[held.number] = held
        self.server.turns[held.list].place(held.number, held.sent)

    def choose(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, since: dict[str, float]
    ) -> tuple[list[Fetched], Credit]:
        """The messages that come first and fit, and the credit that is left; the same again for known UUIDs.

        `since`: list -> ms since when it is unserved. What is chosen has its delivery's UUID then."""
        server = self.server
        server.unserved.update({name: ms for name, ms in since.items() if ms})
        seqs, tokens = list(credit.seqs), list(credit.tokens)
        fetched = Fetch(server, incarnation, self._queues, self._queues[0], rules, seqs, tokens).run(uuids, 0)
        for one in fetched:
            held = self._waiting.pop(server.inflight[incarnation][one.uuid].number, None)
            if held is not None:
                held.uuid = one.uuid
        left = [max(0, one) for one in (*seqs, *tokens)]
        return fetched, Credit((left[0], left[1], left[2], left[3]), (left[4], left[5], left[6], left[7]))

    def waiting(self) -> list[Held]:
        """The messages that may be chosen, in order of arrival."""
        return sorted(self._waiting.values(), key=lambda held: held.number)

    def amounts(self) -> tuple[list[int], list[int]]:
        """Sequences and KV tokens that wait, by tier."""
        seqs, tokens = [0] * 4, [0] * 4
        for held in self._waiting.values():
            seqs[held.rank] += held.seqs
            tokens[held.rank] += held.tokens
        return seqs, tokens

    def drop(self, held: Held, used: int | None = None) -> list[Held]:
        """It is put down: done with, for so many KV tokens, or goes back (None). Returns what goes back with it."""
        if self._waiting.pop(held.number, None) is not None:
            self._forget(held)
        given: Delivery | None = self.server.inflight[held.incarnation].pop(held.uuid, None)
        if given is not None:
            self.server.correct(given, 0 if used is None else max(1, used))
        self.server.reaped.pop(held.id, None)
        return self._next(held, over=used is not None)

    def _forget(self, held: Held) -> None:
        assert held.sent is not None
        turns, tenant = self.server.turns[held.list], held.sent.tenant
        turns.serve(tenant, held.number, 0)

    def _next(self, held: Held, *, over: bool) -> list[Held]:
        group = self._groups.get((held.list, held.group), deque())
        if held not in group:
            return []
        if group[0] is not held:
            group.remove(held)
            return []
        group.popleft()
        if group and over:
            self._open(group[0])
            return []
        del self._groups[held.list, held.group]
        return list(group)
