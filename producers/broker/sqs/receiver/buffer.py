"""Received messages that are not put down yet: which one is next, and which lists are polled for how many more.

The choice of the next has the turns of the broker in memory. Of a FIFO queue's group only the first message may be
chosen. The others wait for it here, since SQS shows none of a group of which one is in flight: once it is acknowledged,
the next may be chosen; if it goes back, they all do.

A list is polled while its tier has credit left after what is in the buffer of its own and better tiers. It waits while
a better list has messages to receive. With nothing to receive, all lists are polled at the same time, each by a
long poll: then a message is had at once, and no list waits for another's poll.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from producers.broker.memory.server import Delivery, Fetch, Server
from producers.broker.sqs.address import lists
from producers.broker.sqs.receiver.flight import ReceivedMessage
from producers.broker.values import Credit, Fetched, Rules
from producers.contract.keys import TIERS

#: Most messages of one ReceiveMessage.
MAX_MESSAGES: Final = 10
#: A poll that is not answered for so long (s) has found nothing: SQS answers at once where there is something.
QUIET_S: Final = 1.0


def places(queue: str) -> list[tuple[str, int]]:
    """The lists of a queue, each with its tier's rank, best tier first."""
    return [(name, TIERS[tier][0]) for name, tier in lists(queue)]


class Buffer:
    """Not thread-safe: its `Receiver` has a lock for it."""

    def __init__(self, queues: Sequence[str], fifo: bool) -> None:
        self._queues, self._fifo = list(queues), fifo
        self.server = Server(places=places)
        self._waiting: dict[int, ReceivedMessage] = {}
        self._groups: dict[tuple[str, str], deque[ReceivedMessage]] = {}

    def add(self, message: ReceivedMessage, returns: int, rules: Rules) -> None:
        """It may be chosen. `returns`: its redeliveries whose worker died."""
        assert message.sent is not None
        message.seqs, message.tokens = message.sent.size(rules.capacity, rules.plain_tokens)
        if returns:
            self.server.reaped[message.id] = returns
        if self._fifo and message.group:
            group = self._groups.setdefault((message.list, message.group), deque())
            group.append(message)
            if group[0] is not message:
                return
        self._open(message)

    def _open(self, message: ReceivedMessage) -> None:
        assert message.sent is not None
        self._waiting[message.number] = message
        self.server.turns[message.list].add(message.number, message.sent)

    def choose(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, since: dict[str, float]
    ) -> tuple[list[Fetched], Credit]:
        """The messages that come first and fit, and the credit that remains; the same again for known UUIDs.

        `since`: list -> ms since when it is unserved. What is chosen has its delivery's UUID then."""
        server = self.server
        server.unserved.update({name: ms for name, ms in since.items() if ms})
        seqs, tokens = list(credit.seqs), list(credit.tokens)
        chosen = Fetch(server, incarnation, self._queues, self._queues[0], rules, seqs, tokens).run(uuids, 0)
        for fetched in chosen:
            message = self._waiting.pop(server.inflight[incarnation][fetched.uuid].number, None)
            if message is not None:
                message.uuid = fetched.uuid
        c = [max(0, amount) for amount in (*seqs, *tokens)]
        return chosen, Credit((c[0], c[1], c[2], c[3]), (c[4], c[5], c[6], c[7]))

    def waiting(self) -> list[ReceivedMessage]:
        """The messages that may be chosen, in order of arrival."""
        return sorted(self._waiting.values(), key=lambda message: message.number)

    def amounts(self) -> tuple[list[int], list[int]]:
        """Sequences and KV tokens that wait, by tier."""
        seqs, tokens = [0] * 4, [0] * 4
        for message in self._waiting.values():
            seqs[message.rank] += message.seqs
            tokens[message.rank] += message.tokens
        return seqs, tokens

    def drop(self, message: ReceivedMessage, used: int | None = None) -> list[ReceivedMessage]:
        """It is put down: done with, for so many KV tokens, or goes back (None). Returns what goes back with it."""
        if self._waiting.pop(message.number, None) is not None:
            self._forget(message)
        delivery: Delivery | None = self.server.inflight[message.incarnation].pop(message.uuid, None)
        if delivery is not None:
            self.server.correct(delivery, 0 if used is None else max(1, used))
        self.server.reaped.pop(message.id, None)
        return self._next(message, over=used is not None)

    def _forget(self, message: ReceivedMessage) -> None:
        assert message.sent is not None
        turns, tenant = self.server.turns[message.list], message.sent.tenant
        turns.serve(tenant, message.number, 0)

    def _next(self, message: ReceivedMessage, *, over: bool) -> list[ReceivedMessage]:
        group = self._groups.get((message.list, message.group), deque())
        if message not in group:
            return []
        if group[0] is not message:
            group.remove(message)
            return []
        group.popleft()
        if group and over:
            self._open(group[0])
            return []
        del self._groups[message.list, message.group]
        return list(group)


# ---- polls ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Blocked:
    """A list whose first message did not fit: it needs so much credit."""

    seqs: int
    tokens: int
    member: str
    mid: str
    until: float
    passed: bool = False
    """It fits, and was passed over for another reason."""


@dataclass(slots=True)
class Line:
    """The state of a list. `due`: messages to receive, by its index; `since`: it waits unserved (ms; 0: empty)."""

    name: str
    queue: str
    rank: int
    due: int = 0
    since: float = 0.0
    polling: float | None = None
    """When its poll began (monotonic), inf while it is about to; None while it has none."""
    entering: bool = False
    """Messages came, which its index may have no more and the buffer not yet."""
    retry_at: float = 0.0
    failures: int = 0
    error: str = ""
    blocked: Blocked | None = None

    def aged(self, rules: Rules, now_ms: float) -> tuple[int, int]:
        """The order of lists: the best first."""
        waited = max(0.0, now_ms - self.since) / (rules.ageing * 1000) if self.since else 0.0
        return self.rank - math.floor(waited), self.rank


@dataclass(slots=True)
class Demand:
    """The worker's last fetch. `seqs`, `tokens`: what the buffer has, by tier."""

    incarnation: str
    credit: Credit
    rules: Rules
    at: float
    seqs: list[int]
    tokens: list[int]
    ahead: int = 0
    """Sequences that the worker has finished in the last second: so many soon fit, too."""

    def room(self, rank: int) -> int:
        """Sequences that a tier has room for. A small stock is kept of what is soon fetched, so that polls are full."""
        room = self.credit.seqs[rank] - sum(self.seqs[: rank + 1])
        if self.credit.tokens[rank] <= sum(self.tokens[: rank + 1]):
            room = min(room, 0)
        return room + min(MAX_MESSAGES, self.ahead) // 2

    def fits(self, rank: int, blocked: Blocked) -> bool:
        fits = self.credit.seqs[rank] >= blocked.seqs and self.credit.tokens[rank] >= blocked.tokens
        return fits and not blocked.passed


def poll_size(line: Line, lines: Sequence[Line], demand: Demand, now: float, now_ms: float) -> tuple[int, float]:
    """The number of messages to ask SQS for, 0 for not now; and the seconds until the next look at the latest."""
    if now < line.retry_at:
        return 0, line.retry_at - now
    room = demand.room(line.rank)
    if room <= 0 or line.blocked:
        return 0, math.inf
    age = line.aged(demand.rules, now_ms)
    pauses = [
        pause
        for other in lines
        if other is not line and other.aged(demand.rules, now_ms) < age
        for pause in [_busy(other, line, demand, now)]
        if pause > 0
    ]
    if pauses:
        return 0, min(pauses)
    return min(MAX_MESSAGES, max(room, demand.ahead)), 0.0


def _busy(better: Line, line: Line, demand: Demand, now: float) -> float:
    """For how long (s) a better list is to be waited for; 0 if it is not."""
    holds_up = math.inf if better.rank <= line.rank else 0.0
    if now < better.retry_at:
        return 0.0
    if better.blocked or better.entering:  # it holds up its own tier and lower ones, no better one
        return holds_up
    if better.due <= 0:
        return 0.0
    if demand.room(better.rank) <= 0:
        return holds_up
    if better.polling is None:
        return math.inf
    return max(0.0, better.polling + QUIET_S - now)


def read_lines(lines: Mapping[str, Line], answer: Sequence[int]) -> None:
    """Enter TAKE's answer for these lists, in their order."""
    for line, due, since in zip(lines.values(), answer[::2], answer[1::2], strict=True):
        line.due, line.since = int(due), float(since)
