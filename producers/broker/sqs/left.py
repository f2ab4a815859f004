"""Gives back what workers that are gone left: their messages in flight, and delayed ones of a queue that nobody serves.

Both may die between any two steps and be repeated; docs/sqs.md has the order of the steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from producers.broker.sqs.connection import Connection
from producers.broker.sqs.hold import calls, reaping
from producers.broker.sqs.hold.errand import Act
from producers.broker.sqs.hold.reaping import Flying, Request
from producers.broker.sqs.hold.requests import GONE, request
from producers.broker.sqs.sending.outgoing import BATCH, Outgoing, send, send_anew
from producers.connection.aws import AwsError
from producers.connection.script import run

#: Messages that one call of `due` sends.
PAGE: Final = 100


def reap(to: Connection, incarnation: str) -> int:
    """As `producers.broker.base.Broker.reap`. Raises AwsError, and redis.exceptions.RedisError; then call it again."""
    count, flying = reaping.read_reap(run(to.store, reaping.reap(incarnation)))
    _over(to, incarnation, [one for one in flying if not one.receipt])
    for ask in reaping.requests(flying):
        refused = request(to, ask.name, Act.DELETE if ask.delete else Act.SHOW, ask.entries)
        _send_lost(to, ask, refused)
        again = {place: error for place, error in refused.items() if error.trouble is not None}
        _over(to, incarnation, [one for place, one in enumerate(ask.messages) if place not in again])
        for error in again.values():
            raise error
    return count


def _send_lost(to: Connection, ask: Request, refused: dict[int, AwsError]) -> None:
    """SQS has no such message, though its record waits: a failover has lost that it went."""
    if not ask.delete:
        lost = [ask.messages[place].id for place, error in refused.items() if error.code in GONE]
        send_anew(to, ask.name, [task_id for task_id in lost if task_id])


def _over(to: Connection, incarnation: str, done: Sequence[Flying]) -> None:
    if done:
        run(to.store, reaping.reaped(incarnation, [one.field for one in done]))


def send_due(to: Connection, queue: str) -> int:
    """Send kept messages whose delay is over. Returns their number; fewer than PAGE: these were all."""
    kept: list[bytes] = run(to.store, calls.due(queue, PAGE))
    by_list: dict[str, list[tuple[bytes, Outgoing]]] = {}
    for entry in kept:
        said = json.loads(entry)
        by_list.setdefault(said["list"], []).append((entry, Outgoing.again(said["list"], said["body"])))
    for name, some in by_list.items():
        for start in range(0, len(some), BATCH):
            batch = some[start : start + BATCH]
            errors = send(to, name, [message for _, message in batch])
            sent = [entry for (entry, _), error in zip(batch, errors, strict=True) if error is None]
            run(to.store, calls.due(queue, 0, sent=sent))
            for error in filter(None, errors):
                raise error
    return len(kept)
