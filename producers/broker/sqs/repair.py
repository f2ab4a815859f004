"""Repairs what dead workers, retention and lost replies leave behind. Sweepers do it.

a dead worker's message in flight             -> goes back to its queue, or is deleted (`reap`)
a kept message whose delay is over            -> is sent, if no worker serves its queue (`send_due`)
an entry whose task is settled, or gone       -> leaves the index; if its message comes, CLAIM says `done` (`Repair`)
an entry older than the retention less a day  -> its message is sent anew; of two copies CLAIM lets one run (`Repair`)

A process may die between any two steps, and each may be repeated; docs/how/sqs.md has the order of the steps.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.broker.sqs.queues import MIN_RETENTION_S, RENEW_BEFORE_S, Connection
from producers.broker.sqs.receiver import flight
from producers.broker.sqs.receiver.flight import BATCH, PACKAGE, BatchRequest, InFlight
from producers.broker.sqs.receiver.send import GONE, Action, send_batch
from producers.broker.sqs.sending import Outgoing, send, send_anew
from producers.connection.aws import AwsError
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, ms, run, script, text
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys as contract_keys

logger = logging.getLogger(__name__)

#: Entries of each list that one step reads.
PAGE: Final = 2000
#: Kept messages that one call of `send_due` sends.
DUE_PAGE: Final = 100
#: Time (ms) for which it is kept that a message was sent again: SQS keeps none for longer than 14 days.
RENEWED_MS: Final = 15 * 24 * 3600 * 1000


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
    """Send messages again that SQS does not have though their records wait: a failover lost that they were deleted."""
    if not request.delete:
        lost = [request.messages[index].id for index, error in refused.items() if error.code in GONE]
        send_anew(to, request.name, [task_id for task_id in lost if task_id])


def _over(to: Connection, incarnation: str, done: Sequence[InFlight]) -> None:
    if done:
        run(to.store, flight.reaped(incarnation, [entry.field for entry in done]))


def send_due(to: Connection, queue: str) -> int:
    """Send kept messages whose delay is over. Returns their number; fewer than DUE_PAGE: these were all."""
    kept: list[bytes] = run(to.store, flight.due(queue, DUE_PAGE))
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An entry of the index. `since`: ms at which its message was sent, or earlier."""

    member: str
    id: str
    since: int
    over: bool
    """Whether its task needs no message any more."""


class Repair:
    """Repairs the index, page by page; remembers its position. The leading sweeper uses it, one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._to = connection
        self._cursors: dict[str, int] = {}

    def step(self) -> None:
        """Repair one page of each list's entries. Raises redis.exceptions.RedisError, and AwsError if SQS is away."""
        store = self._to.store
        now = ms(store.time())
        for name in sorted(map(text, store.smembers(keys.LISTS))):
            page = self._page(name)
            run(store, gone(name, [entry.member for entry in page if entry.over]))
            self._renew(name, [entry for entry in page if not entry.over], now)
        store.zremrangebyscore(keys.RENEWED, "-inf", now - RENEWED_MS)

    def _page(self, name: str) -> list[_Waiting]:
        store = self._to.store
        self._cursors[name], raw = store.zscan(keys.waiting(name), self._cursors.get(name, 0), count=PAGE)
        page = [(text(member), float(score)) for member, score in raw]
        with store.pipeline(transaction=False) as pipe:
            for member, _ in page:
                pipe.hmget(contract_keys.task(_id(member)), "status", "settled", "created")
                pipe.zscore(keys.RENEWED, _id(member))
            answers = pipe.execute()
        entries = []
        for (member, score), (status, settled, created), renewed in zip(page, answers[::2], answers[1::2], strict=True):
            since = int(max(float(created or score), renewed or 0))
            entries.append(_Waiting(member, _id(member), since, over=not status or settled is not None))
        return entries

    def _renew(self, name: str, entries: Sequence[_Waiting], now: int) -> None:
        """Send again the messages that are so old that their queue is about to drop them."""
        old = [entry for entry in entries if now - entry.since > (MIN_RETENTION_S - RENEW_BEFORE_S) * 1000]
        if not old:
            return
        try:
            keeps_ms = (self._to.queues.check(name).retention - RENEW_BEFORE_S) * 1000
            late = [entry.id for entry in old if now - entry.since > keeps_ms]
            for start in range(0, len(late), BATCH):
                send_anew(self._to, name, late[start : start + BATCH])
        except AwsError as error:
            if trouble(error) is Trouble.AWAY:
                raise
            warn_throttled(logger, "Old messages are not sent anew: %s", error)


def _id(member: str) -> str:
    return member.partition(" ")[0]


def gone(name: str, members: Sequence[str]) -> Call:
    """Remove messages from a list's index, since nobody needs them. Answers how many were there."""
    return Call(script(PACKAGE, "gone"), (shared.UNSERVED,), (name, *members))
