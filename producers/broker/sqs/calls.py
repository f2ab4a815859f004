"""The scripts of senders and operators: one function each, giving the `Call` to send.

The preconditions, effects and answers stand at the head of each `scripts/*.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.connection.script import Call, script, text

PACKAGE: Final = "producers.broker.sqs"


class Counts(NamedTuple):
    """One list. `oldest`: ms for which the message has waited that waits for longest; below 0 where none does."""

    waiting: int
    delayed: int
    tenants: int
    oldest: int


@dataclass(frozen=True, slots=True)
class Said:
    """The books, as read. `taken`: KV tokens of all messages ever delivered."""

    taken: int
    dead_letters: int
    workers: dict[str, tuple[str, int]]
    """Incarnation -> its pool's queue, its messages in flight."""
    delayed: list[int]
    """For each queue, messages with a delay that is longer than SQS's longest."""
    lists: list[Counts]


def sent(name: str, entries: Sequence[tuple[str, int]]) -> Call:
    """`entries`: member and ms of submit of each message that is about to be sent. Answers how many are new."""
    return Call(script(PACKAGE, "sent"), (), (name, *(part for entry in entries for part in entry)))


def depths(queues: Sequence[str], names: Sequence[str]) -> Call:
    """`names`: lists. `read_depths` reads the answer."""
    delayed = [keys.delayed(queue) for queue in queues]
    return Call(script(PACKAGE, "depths"), (shared.INCARNATIONS, shared.DEAD, shared.DELIVERED_TOKENS, *delayed), names)


def read_depths(answer: Sequence[Any]) -> Said:
    taken, dead, workers, delayed, *lists = answer
    rows = zip(workers[::3], workers[1::3], workers[2::3], strict=True)
    by_name = {text(incarnation): (text(queue), int(held)) for incarnation, queue, held in rows}
    return Said(int(taken), int(dead), by_name, list(delayed), [Counts(*counts) for counts in lists])


def gone(name: str, members: Sequence[str]) -> Call:
    """Nobody needs these messages of a list. Answers how many were in its index."""
    return Call(script(PACKAGE, "gone"), (shared.UNSERVED,), (name, *members))
