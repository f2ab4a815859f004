"""The way of a message to SQS: up to ten a request, each with an outcome of its own.

    Outgoing ─▶ send: entered in its list's index, then SendMessageBatch
    Outgoing ─▶ Batcher.put (asyncio): shares a request with what is sent at the same time ─▶ send
    a message of Celery's own (link, chord, plain task) ─▶ put_celery: as kombu puts it

On a standard queue a message's group is its tenant: SQS's fair queues then keep one tenant's backlog from delaying
others. On a FIFO queue it is the task's `order_key` within its tenant, or its id: SQS hands out a group's messages one
after another.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Self

from producers.broker.memory.message import Unusable
from producers.broker.memory.message import read as received
from producers.broker.sqs import keys
from producers.broker.sqs.address import is_celery, split, sqs_name
from producers.broker.sqs.queues import Connection
from producers.broker.sqs.receiver import flight
from producers.broker.sqs.receiver.flight import BATCH
from producers.connection.aws import AwsError, AwsMissing, refusal
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run
from producers.contract import keys as contract_keys
from producers.contract.message import Message
from producers.contract.record import Record

logger = logging.getLogger(__name__)

#: Bytes of one request's bodies, unless it has one alone. AWS takes 1 MiB; others still what it took until 2025.
BATCH_BYTES: Final = 256 * 1024
#: VisibilityTimeout (s) of a Celery queue that is made, as kombu's.
CELERY_VISIBILITY_S: Final = 1800
#: A group as SQS takes it: printable ASCII without the space.
_GROUP: Final = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way to a list."""

    body: str
    member: str = ""
    """Its entry in the index; empty for none."""
    at: int = 0
    """When its task was submitted (ms); 0: unknown."""
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
        """A message for a list, from its own text. One that cannot be read is sent as it is, without an entry."""
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


# ---- requests -------------------------------------------------------------------------------------------------------


def send(to: Connection, name: str, messages: Sequence[Outgoing]) -> list[AwsError | None]:
    """Enter at most BATCH messages into a list's index, then send them in one request, or several if they are large.

    Returns each message's error, None for those that were sent. Raises AwsError and redis.exceptions.RedisError if none
    was sent, or nobody knows. Repeating it makes second messages, but no second entries.
    """
    if indexed := [(message.member, message.at) for message in messages if message.member]:
        run(to.store, flight.sent(name, indexed))
    url = to.queues.url(name)
    entries = [_entry(str(index), message, url) for index, message in enumerate(messages)]
    failures = []
    for request in _requests(entries):
        with to.queues.aws_errors("send to", name, "sqs:SendMessage"):
            failures += to.sqs.send_message_batch(QueueUrl=url, Entries=request).get("Failed", [])
    outcome: list[AwsError | None] = [None] * len(messages)
    for failure in failures:
        doing = f"send to {to.queues.called(name)}"
        outcome[int(failure["Id"])] = refusal(doing, "sqs:SendMessage", failure["Code"], failure.get("Message", ""))
    return outcome


def send_one(to: Connection, name: str, message: Outgoing) -> None:
    """As `send`. Raises the message's error."""
    (error,) = send(to, name, [message])
    if error is not None:
        raise error


def send_anew(to: Connection, name: str, ids: Sequence[str]) -> None:
    """Send messages of waiting tasks again, to the list that they wait in: SQS lost them, or is about to drop them.

    Their new age counts once they are sent. Raises as `send`, and the first message's error.
    """
    with to.store.pipeline(transaction=False) as pipe:
        for task_id in ids:
            pipe.hgetall(contract_keys.task(task_id))
        records = zip(ids, pipe.execute(), strict=True)
    waiting = [_waiting_message(Record.parse(task_id, raw)) for task_id, raw in records]
    messages = [message for message in waiting if message is not None]
    if not messages:
        return
    errors = send(to, name, [Outgoing.of(message) for message in messages])
    now, _ = to.store.time()
    if sent := {message.id: now * 1000 for message, error in zip(messages, errors, strict=True) if error is None}:
        to.store.zadd(keys.RENEWED, sent)
    for error in filter(None, errors):
        raise error


def _waiting_message(record: Record) -> Message | None:
    """The message of a record; None if its task needs no message any more."""
    if "status" not in record.fields or "settled" in record.fields:
        return None
    try:
        return Message.of(record)
    except (KeyError, ValueError) as error:
        warn_throttled(logger, "The record of task %s is broken, its message is not sent anew: %r", record.id, error)
        return None


def _requests(entries: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Divide entries into requests of at most BATCH_BYTES."""
    requests: list[list[dict[str, Any]]] = []
    room = 0
    for entry in entries:
        size = len(entry["MessageBody"].encode(errors="surrogateescape"))
        if not requests or size > room:
            requests.append([])
            room = BATCH_BYTES
        requests[-1].append(entry)
        room -= size
    return requests


def _entry(id_: str, message: Outgoing, url: str) -> dict[str, Any]:
    entry = {"Id": id_, "MessageBody": message.body}
    if url.endswith(".fifo"):
        # Not the task's id: SQS would drop, for five minutes, what is sent again on purpose.
        return entry | {"MessageGroupId": _group(message.key), "MessageDeduplicationId": uuid.uuid4().hex}
    return entry | ({"MessageGroupId": _group(message.tenant)} if message.tenant else {})


def _group(name: str) -> str:
    """A name as SQS takes it. The empty name is the group of messages that cannot be read."""
    return name if _GROUP.fullmatch(name) else hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()


# ---- from an event loop ---------------------------------------------------------------------------------------------

#: Sends messages to a list. Returns each one's error, None for those that were sent; an exception is the error of all.
Send = Callable[[str, Sequence[Outgoing]], Awaitable[Sequence[Exception | None]]]


class Batcher:
    """Sends messages that come at the same time in one request.

    No message waits for others: only once `max_requests` are under way do messages gather. `in_order`: one request at a
    time for each list, so that no message overtakes another.
    """

    def __init__(self, send: Send, max_requests: int, *, in_order: bool) -> None:
        self._send, self._max_requests, self._in_order = send, max_requests, in_order
        self._waiting: dict[str, deque[tuple[Outgoing, asyncio.Future[None]]]] = {}
        self._running: dict[asyncio.Task[None], str] = {}
        self._due = False

    def put(self, name: str, message: Outgoing) -> asyncio.Future[None]:
        """The future is done once the message is sent. One that is cancelled before its request is not sent."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(name, deque()).append((message, future))
        if not self._due:
            self._due = True
            loop.call_soon(self._start)
        return future

    def close(self) -> None:
        """Send nothing more, and cancel all who wait."""
        for task in self._running:
            task.cancel()
        for waiting in self._waiting.values():
            for _, future in waiting:
                future.cancel()
        self._waiting.clear()

    def _start(self) -> None:
        """Begin as many requests as may be under way, a list after the other."""
        self._due = False
        while len(self._running) < self._max_requests and (name := self._first()) is not None:
            if batch := self._next(name):
                task = asyncio.create_task(self._run(name, batch))
                self._running[task] = name
                task.add_done_callback(self._ended)

    def _first(self) -> str | None:
        busy = self._running.values() if self._in_order else ()
        return next((name for name in self._waiting if name not in busy), None)

    def _next(self, name: str) -> list[tuple[Outgoing, asyncio.Future[None]]]:
        waiting = self._waiting.pop(name)
        batch: list[tuple[Outgoing, asyncio.Future[None]]] = []
        while waiting and len(batch) < BATCH:
            message, future = waiting.popleft()
            if not future.done():
                batch.append((message, future))
        if waiting:
            self._waiting[name] = waiting  # the last now: the other lists come first
        return batch

    async def _run(self, name: str, batch: Sequence[tuple[Outgoing, asyncio.Future[None]]]) -> None:
        outcomes: Sequence[Exception | None]
        try:
            outcomes = await self._send(name, [message for message, _ in batch])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is for those who wait
            outcomes = [error] * len(batch)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._start()


# ---- Celery's own messages ------------------------------------------------------------------------------------------


def put_celery(to: Connection, queue: str, message: str) -> None:
    """Send a message (JSON as kombu writes it) to a Celery queue, which is made if it does not exist, as kombu does.

    The message is put as kombu's SQS transport puts it (`kombu.transport.SQS.Channel._put`), into a queue of the name
    that kombu would use, so that kombu's consumers find and read it. Raises AwsError and redis.exceptions.RedisError.
    """
    name = f"{queue}#default"
    try:
        url = to.queues.url(name)
    except AwsMissing:
        url = _make_celery_queue(to, name)
    body = base64.b64encode(message.encode()).decode()
    with to.queues.aws_errors("send to", name, "sqs:SendMessage"):
        to.sqs.send_message(QueueUrl=url, MessageBody=body, **_celery_group(url, json.loads(message)["properties"]))


def _make_celery_queue(to: Connection, name: str) -> str:
    queue_name = sqs_name(to.address, name)
    attributes = {"VisibilityTimeout": str(CELERY_VISIBILITY_S)}
    if queue_name.endswith(".fifo"):
        attributes["FifoQueue"] = "true"
    with to.queues.aws_errors("make", name, "sqs:CreateQueue"):
        url: str = to.sqs.create_queue(QueueName=queue_name, Attributes=attributes)["QueueUrl"]
    return url


def _celery_group(url: str, properties: dict[str, Any]) -> dict[str, str]:
    """The message's group and its id for deduplication, under the names that Celery's senders use."""
    group = {"MessageGroupId": group_id} if (group_id := properties.get("MessageGroupId")) else {}
    if not url.endswith(".fifo"):
        return group
    deduplication_id = properties.get("MessageDeduplicationId") or str(uuid.uuid4())
    return {"MessageGroupId": "default", **group, "MessageDeduplicationId": deduplication_id}
