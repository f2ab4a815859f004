"""Gives back what workers that are gone left: their messages in flight, and delayed ones of a queue that nobody serves.

Both may die between any two steps and be repeated; docs/how/sqs.md has the order of the steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from producers.broker.sqs.connection import Connection
from producers.broker.sqs.receiver import flight
from producers.broker.sqs.receiver.flight import BatchRequest, InFlight
from producers.broker.sqs.receiver.send import GONE, Action, send_batch
from producers.broker.sqs.sending.outgoing import BATCH, Outgoing, send, send_anew
from producers.connection.aws import AwsError
from producers.connection.script import run

#: Messages that one call of `due` sends.
PAGE: Final = 100


def reap(to: Connection, incarnation: str) -> int:
    """As `producers.broker.base.Broker.reap`. Raises AwsError, and redis.exceptions.RedisError; then call it again."""
    count, entries = flight.read_reap(run(to.store, flight.reap(incarnation)))
    _over(to, incarnation, [entry for entry in entries if not entry.receipt])
    for request in flight.batch_requests(entries):
        refused = send_batch(to, request.name, Action.DELETE if request.delete else Action.SHOW, request.entries)
        _send_lost(to, request, refused)
        again = {index: error for index, error in refused.items() if error.trouble is not None}
        _over(to, incarnation, [entry for index, entry in enumerate(request.messages) if index not in again])
        for error in again.values():
            raise error
    return count


def _send_lost(to: Connection, request: BatchRequest, refused: dict[int, AwsError]) -> None:
    """SQS has no such message, though its record waits: a failover has lost that it went."""
    if not request.delete:
        lost = [request.messages[index].id for index, error in refused.items() if error.code in GONE]
        send_anew(to, request.name, [task_id for task_id in lost if task_id])


def _over(to: Connection, incarnation: str, done: Sequence[InFlight]) -> None:
    if done:
        run(to.store, flight.reaped(incarnation, [entry.field for entry in done]))


def send_due(to: Connection, queue: str) -> int:
    """Send kept messages whose delay is over. Returns their number; fewer than PAGE: these were all."""
    kept: list[bytes] = run(to.store, flight.due(queue, PAGE))
    by_list: dict[str, list[tuple[bytes, Outgoing]]] = {}
    for entry in kept:
        message = json.loads(entry)
        outgoing = Outgoing.again(message["list"], message["body"])
        by_list.setdefault(message["list"], []).append((entry, outgoing))
    for name, messages in by_list.items():
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            errors = send(to, name, [message for _, message in batch])
            sent = [entry for (entry, _), error in zip(batch, errors, strict=True) if error is None]
            run(to.store, flight.due(queue, 0, sent=sent))
            for error in filter(None, errors):
                raise error
    return len(kept)
