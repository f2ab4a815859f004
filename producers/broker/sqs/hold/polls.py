"""Decides which lists are polled now, and for how many messages each.

A list is polled while its tier has credit left after what is in the buffer of its own and better tiers. It waits while
a better list has messages to receive. With nothing to receive, all lists are polled at the same time, each by a
long poll: then a message is had at once, and no list waits for another's poll.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from producers.broker.values import Credit, Rules

#: Most messages of one ReceiveMessage.
MOST: Final = 10
#: A poll that is not answered for so long (s) has found nothing: SQS answers at once where there is something.
QUIET_S: Final = 1.0


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
class Wants:
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
        """Sequences that a tier has room for. A small stock is kept of what is soon taken, so that polls are full."""
        left = self.credit.seqs[rank] - sum(self.seqs[: rank + 1])
        if self.credit.tokens[rank] <= sum(self.tokens[: rank + 1]):
            left = min(left, 0)
        return left + min(MOST, self.ahead) // 2

    def fits(self, rank: int, blocked: Blocked) -> bool:
        fits = self.credit.seqs[rank] >= blocked.seqs and self.credit.tokens[rank] >= blocked.tokens
        return fits and not blocked.passed


def ask(line: Line, lines: Sequence[Line], wants: Wants, now: float, now_ms: float) -> tuple[int, float]:
    """The number of messages to ask for, 0 for not now; and the seconds until the next look at the latest."""
    if now < line.retry_at:
        return 0, line.retry_at - now
    room = wants.room(line.rank)
    if room <= 0 or line.blocked:
        return 0, math.inf
    own = line.aged(wants.rules, now_ms)
    pauses = [
        pause
        for other in lines
        if other is not line and other.aged(wants.rules, now_ms) < own
        for pause in [_busy(other, line, wants, now)]
        if pause > 0
    ]
    if pauses:
        return 0, min(pauses)
    return min(MOST, max(room, wants.ahead)), 0.0


def _busy(better: Line, line: Line, wants: Wants, now: float) -> float:
    """For how long (s) a better list is to be waited for; 0 if it is not."""
    holds_up = math.inf if better.rank <= line.rank else 0.0
    if now < better.retry_at:
        return 0.0
    if better.blocked or better.entering:  # it holds up its own tier and lower ones, no better one
        return holds_up
    if better.due <= 0:
        return 0.0
    if wants.room(better.rank) <= 0:
        return holds_up
    if better.polling is None:
        return math.inf
    return max(0.0, better.polling + QUIET_S - now)


def read_look(lines: Mapping[str, Line], answer: Sequence[int]) -> None:
    """The answer of TAKE for these lists, in their order."""
    for line, due, since in zip(lines.values(), answer[::2], answer[1::2], strict=True):
        line.due, line.since = int(due), float(since)
