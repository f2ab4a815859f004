"""Sends to SQS, up to ten messages a request; each message has an outcome of its own.

On a standard queue a message's group is its tenant: SQS's fair queues then keep one tenant's backlog from delaying
others. On a FIFO queue it is the task's `order_key` within its tenant, or its id: SQS hands out a group's messages one
after another.
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Self

from producers.broker.memory.message import Unusable
from producers.broker.memory.message import read as received
from producers.broker.sqs import calls, keys
from producers.broker.sqs.connection import Connection
from producers.broker.sqs.names import is_celery, split
from producers.connection.aws import AwsError, refusal
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run
from producers.contract import keys as contract_keys
from producers.contract.message import Message
from producers.contract.record import Record

logger = logging.getLogger(__name__)

#: Messages of one request, at most.
BATCH: Final = 10
#: Bytes of one request's bodies, unless it has one alone. AWS takes 1 MiB; others still what it took until 2025.
BATCH_BYTES: Final = 256 * 1024
#: A group as SQS takes it: printable ASCII without the space.
_GROUP: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a list."""

    body: str
    member: str = ""
    """Its entry in the index; empty for none."""
    at: int = 0
    """When its task was submitted (ms); 0: not known."""
    tenant: str = ""
    key: str = ""
    """Messages of the same key stay in order, on FIFO queues."""

    @classmethod
    def of(cls, message: Message) -> Self:
        member = "" if is_celery(message.queue) else str(keys.Entry.of(message))
        key = _key(message.tenant, message.order_key, message.id)
        return cls(message.envelope(), member, message.at, message.tenant, key)

    @classmethod
    def again(cls, name: str, body: str) -> Self:
        """Of a message's own text, for a list. What cannot be read is sent as it is, without an entry."""
        try:
            sent = received(body.encode(errors="surrogateescape"))
        except Unusable:
            return cls(body)
        member = "" if is_celery(split(name)[0]) else keys.member(sent)
        at = int(sent.at) if sent.at < inf else 0
        return cls(body, member, at, sent.tenant, _key(sent.tenant, sent.order_key, sent.id))


def _key(tenant: str, order_key: str, task_id: str) -> str:
    """Tenants do not wait for each other's keys."""
    return f"{tenant} {order_key}" if tenant and order_key else order_key or task_id


def send(to: Connection, name: str, messages: Sequence[Outgoing]) -> list[AwsError | None]:
    """Enter at most BATCH messages into a list's index, then send them in one request, or several if they are large.

    Returns what went wrong with each, None where nothing did. Raises AwsError, and redis.exceptions.RedisError, where
    none was sent, or nobody knows. Repeating it makes second messages, and no second entries.
    """
    if indexed := [(one.member, one.at) for one in messages if one.member]:
        run(to.store, calls.sent(name, indexed))
    url = to.queues.url(name)
    entries = [_entry(str(place), one, url) for place, one in enumerate(messages)]
    failed = []
    for request in _requests(entries):
        with to.queues.telling("send to", name, "sqs:SendMessage"):
            failed += to.sqs.send_message_batch(QueueUrl=url, Entries=request).get("Failed", [])
    outcome: list[AwsError | None] = [None] * len(messages)
    for said in failed:
        doing = f"send to {to.queues.called(name)}"
        outcome[int(said["Id"])] = refusal(doing, "sqs:SendMessage", said["Code"], said.get("Message", ""))
    return outcome


def _requests(entries: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = []
    room = 0
    for entry in entries:
        size = len(entry["MessageBody"].encode(errors="surrogateescape"))
        if not found or size > room:
            found.append([])
            room = BATCH_BYTES
        found[-1].append(entry)
        room -= size
    return found


def send_one(to: Connection, name: str, message: Outgoing) -> None:
    """As `send`. Raises what went wrong."""
    (error,) = send(to, name, [message])
    if error is not None:
        raise error


def send_anew(to: Connection, name: str, ids: Sequence[str]) -> None:
    """Send messages of waiting tasks again, to the list that they wait in: SQS has them no more, or not for long.

    Their new age counts once they are sent. Raises as `send`, and what went wrong with the first.
    """
    with to.store.pipeline(transaction=False) as pipe:
        for task_id in ids:
            pipe.hgetall(contract_keys.task(task_id))
        records = zip(ids, pipe.execute(), strict=True)
    messages = [found for task_id, raw in records if (found := _waiting(Record.parse(task_id, raw))) is not None]
    if not messages:
        return
    errors = send(to, name, [Outgoing.of(message) for message in messages])
    now, _ = to.store.time()
    if sent := {message.id: now * 1000 for message, error in zip(messages, errors, strict=True) if error is None}:
        to.store.zadd(keys.RENEWED, sent)
    for error in filter(None, errors):
        raise error


def _waiting(record: Record) -> Message | None:
    """The message of a record, unless that needs none any more."""
    if "status" not in record.fields or "settled" in record.fields:
        return None
    try:
        return Message.of(record)
    except (KeyError, ValueError) as error:
        warn_throttled(logger, "The record of task %s is broken, its message is not sent anew: %r", record.id, error)
        return None


def _entry(place: str, message: Outgoing, url: str) -> dict[str, Any]:
    entry = {"Id": place, "MessageBody": message.body}
    if url.endswith(".fifo"):
        # Not the task's id: SQS would drop, for five minutes, what is sent again on purpose.
        return entry | {"MessageGroupId": _group(message.key), "MessageDeduplicationId": uuid.uuid4().hex}
    return entry | ({"MessageGroupId": _group(message.tenant)} if message.tenant else {})


def _group(name: str) -> str:
    """A name as SQS takes it; the empty one is the group of what cannot be read."""
    return name if _GROUP.fullmatch(name) else hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
