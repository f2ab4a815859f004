"""Received messages that are not put down yet: the choice of the next one, and of how many more to poll for.

The choice of the next message has the turns of the broker in memory. Only the first message of a FIFO queue's group may
be chosen. The others wait for it here, since SQS shows no message of a group while one is in flight: once it is
acknowledged, the next may be chosen; if it goes back, they all do.

A list is polled while its tier has more credit than the buffer's messages of its own and better tiers need. It waits
while a better list has messages to receive. If no list has any, all are polled at the same time, each by a long poll: a
new message arrives at once, and no list waits for another's poll.
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

#: Messages of one ReceiveMessage, at most.
MAX_MESSAGES: Final = 10
#: A poll without an answer for so long (s) has found no message: SQS answers at once if it has one.
QUIET_S: Final = 1.0


def places(queue: str) -> list[tuple[str, int]]:
    """The lists of a queue, each with its tier's rank, best tier first."""
    return [(name, TIERS[tier][0]) for name, tier in lists(queue)]


class Buffer:
    """The messages of one `Receiver`, whose lock guards it."""

    def __init__(self, queues: Sequence[str], fifo: bool) -> None:
        self._queues, self._fifo = list(queues), fifo
        self.server = Server(places=places)
        self._waiting: dict[int, ReceivedMessage] = {}
        self._groups: dict[tuple[str, str], deque[ReceivedMessage]] = {}

    def add(self, message: ReceivedMessage, returns: int, rules: Rules) -> None:
        """Add a message that may be chosen. `returns`: its redeliveries whose worker died."""
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
        """The messages that come first and fit, and the remaining credit; the same again for the same UUIDs.

        `since`: list -> ms since when it is unserved. Sets the UUIDs of the chosen messages."""
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
        """Drop a message that is done, after `used` KV tokens, or goes back (None). Returns those that follow it."""
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
    """The credit that the first message of a list needs, which did not fit."""

    seqs: int
    tokens: int
    member: str
    mid: str
    until: float
    passed: bool = False
    """Whether it fits, and was passed over for another reason."""


@dataclass(slots=True)
class Line:
    """The state of a list. `due`: messages to receive, by its index; `since`: unserved since (ms; 0: empty)."""

    name: str
    queue: str
    rank: int
    due: int = 0
    since: float = 0.0
    polling: float | None = None
    """When its poll began (monotonic); inf: it is about to; None: it has none."""
    entering: bool = False
    """Whether messages came that its index may have no more, and the buffer not yet."""
    retry_at: float = 0.0
    failures: int = 0
    error: str = ""
    blocked: Blocked | None = None

    def aged(self, rules: Rules, now_ms: float) -> tuple[int, int]:
        """The list's sort key: the best list comes first."""
        waited = max(0.0, now_ms - self.since) / (rules.ageing * 1000) if self.since else 0.0
        return self.rank - math.floor(waited), self.rank


@dataclass(slots=True)
class Demand:
    """The worker's last fetch. `seqs`, `tokens`: needs of the buffer's messages, by tier."""

    incarnation: str
    credit: Credit
    rules: Rules
    at: float
    seqs: list[int]
    tokens: list[int]
    ahead: int = 0
    """Sequences that the worker finished in the last second: so many more will fit soon."""

    def room(self, rank: int) -> int:
        """Sequences that a tier has room for, plus a small stock for the next fetch, so that polls are full."""
        room = self.credit.seqs[rank] - sum(self.seqs[: rank + 1])
        if self.credit.tokens[rank] <= sum(self.tokens[: rank + 1]):
            room = min(room, 0)
        return room + min(MAX_MESSAGES, self.ahead) // 2

    def fits(self, rank: int, blocked: Blocked) -> bool:
        fits = self.credit.seqs[rank] >= blocked.seqs and self.credit.tokens[rank] >= blocked.tokens
        return fits and not blocked.passed


def poll_size(line: Line, lines: Sequence[Line], demand: Demand, now: float, now_ms: float) -> tuple[int, float]:
    """The number of messages to poll for now, and the seconds until the next decision, at most."""
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
    """For how long (s) to wait for a better list; 0: not at all."""
    blocks = math.inf if better.rank <= line.rank else 0.0
    if now < better.retry_at:
        return 0.0
    if better.blocked or better.entering:  # it blocks its own tier and lower ones, no better one
        return blocks
    if better.due <= 0:
        return 0.0
    if demand.room(better.rank) <= 0:
        return blocks
    if better.polling is None:
        return math.inf
    return max(0.0, better.polling + QUIET_S - now)


def read_lines(lines: Mapping[str, Line], answer: Sequence[int]) -> None:
    """Update the lists by TAKE's answer, which has their order."""
    for line, due, since in zip(lines.values(), answer[::2], answer[1::2], strict=True):
        line.due, line.since = int(due), float(since)
