"""Inboxes: queues of messages, each hidden from other processes while one process works on it.

`Inbox` is the interface. `SqsInbox` is an SQS queue. `ListInbox` is a list of the store: senders RPUSH, and messages
are taken from its head.

| key of a list | what it holds |
| --- | --- |
| `NAME` | messages that wait |
| `NAME:taken` | hash: a message's id -> its body, of those that a process works on |
| `NAME:hidden` | zset: id -> server time (ms) until which it is hidden from others |
| `NAME:dead` | list: bad messages as JSON `{id, reason, at, body}`; nothing removes them |

**Consumer.** Works through an inbox: each message is handled until it is done or bad, and hidden from others meanwhile.

    receive ─▶ handle ─▶ remove            handle raises BadMessage ─▶ bury
                 ▲  └─ a server is away: wait, and handle again; nothing more is received

If the process is killed anywhere, the message is received again when it is no longer hidden. So `handle` may be called
twice for a message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.steps import FAILURES, backoff
from producers.connection.aws import AwsError, refusal
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, arun, script
from producers.connection.trouble import Trouble, error_text, sleep_unless_cancelled, trouble
from producers.errors import SubmitFailed, shown
from producers.sources.aws import Service, last_part, region_of, too_large
from producers.sources.source import ended
from producers.store.protocol import PACKAGE

log = logging.getLogger(__name__)

#: Time (s) for which a receive from a list waits for a message.
LIST_WAIT_S: Final = 2.0
#: Most messages of one receive from a list.
LIST_BATCH: Final = 10
#: Time (s) for which a message of SQS is hidden, and for which a receive waits: a stop waits for it, too.
HIDDEN_S: Final = 60
SQS_WAIT_S: Final = 5
#: Time (s) until a bad message that stays in its queue is received again, until the redrive policy moves it.
BAD_AGAIN_S: Final = 10
#: Longest text (characters) of an attribute that says why a message is bad.
REASON: Final = 1024
#: Longest body, and longest of its sender's attributes, (characters) of a letter that is shortened.
SHORT_BODY, SHORT_ATTRIBUTE = 4096, 256


class BadMessage(Exception):
    """A message that can never be handled, however often it is tried. The text says why."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message, as it was received once."""

    id: str
    """Stays the same each time that the message is received."""
    body: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    receipt: str = ""
    """Names this receive."""


class Inbox(ABC):
    """A queue. Calls raise redis.exceptions.RedisError or OSError, and may be repeated.

    A message that is not removed or buried within `hidden_s` seconds is received again, by any process.
    """

    hidden_s: float

    @abstractmethod
    async def open(self) -> None:
        """Check that the queue is there and fits. Raises OSError, which says what to do."""

    @abstractmethod
    async def receive(self) -> list[Received]:
        """The next messages, at most ten. Waits a few seconds for the first."""

    @abstractmethod
    async def remove(self, messages: Sequence[Received]) -> None:
        """Remove messages whose work is done."""

    @abstractmethod
    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        """Hide messages for `seconds` from now on; 0 gives them back at once. Those that are gone are left out."""

    @abstractmethod
    async def bury(self, message: Received, reason: str) -> None:
        """Move a bad message to the dead letters, where an operator finds it."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""


class ListInbox(Inbox):
    """A list by its name. `waiting`: connections to the store that may wait, which takes others' place in a pool."""

    def __init__(self, store: Redis, waiting: Redis, name: str, hidden_s: float) -> None:
        self._store, self._waiting, self._name, self.hidden_s = store, waiting, name, hidden_s
        self._in_progress, self._hidden, self._dead = f"{name}:taken", f"{name}:hidden", f"{name}:dead"

    async def open(self) -> None:
        """Does nothing: a list exists once somebody pushes to it."""

    async def receive(self) -> list[Received]:
        if messages := await self._take():
            return messages
        # It moves the head to where it was: a wait for a message that changes nothing.
        async with asyncio.timeout(LIST_WAIT_S + SILENT_S):
            await self._waiting.execute_command("BLMOVE", self._name, self._name, "LEFT", "LEFT", LIST_WAIT_S)
        return await self._take()

    async def remove(self, messages: Sequence[Received]) -> None:
        ids = [message.id for message in messages]
        async with asyncio.timeout(SILENT_S), self._store.pipeline(transaction=True) as pipe:
            pipe.hdel(self._in_progress, *ids)
            pipe.zrem(self._hidden, *ids)
            await pipe.execute()

    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        if messages:
            await self._run("list_hide", (self._hidden,), int(seconds * 1000), *(message.id for message in messages))

    async def bury(self, message: Received, reason: str) -> None:
        letter = {"id": message.id, "reason": reason, "at": int(time.time()), "body": message.body}
        await self._run("list_bury", (self._in_progress, self._hidden, self._dead), message.id, json.dumps(letter))

    def close(self) -> None:
        """The store's connections are the client's."""

    async def _take(self) -> list[Received]:
        ids = [uuid.uuid4().hex for _ in range(LIST_BATCH)]
        answer = await self._run(
            "list_take", (self._name, self._in_progress, self._hidden), int(self.hidden_s * 1000), *ids
        )
        texts = [text.decode("utf-8", "surrogateescape") for text in answer]
        return [Received(message_id, body) for message_id, body in zip(texts[::2], texts[1::2], strict=True)]

    async def _run(self, name: str, keys: Sequence[str], *args: str | int) -> list[bytes]:
        async with asyncio.timeout(SILENT_S):
            answer: list[bytes] = await arun(self._store, Call(script(PACKAGE, name), keys, args))
        return answer


class SqsInbox(Inbox):
    """A queue by its URL. `visibility`: seconds for which a received message is hidden, renewed at half.

    `dead_letters`: the URL of the queue for bad messages; without it, the queue's redrive policy moves them.
    """

    def __init__(
        self,
        url: str,
        *,
        dead_letters: str | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
        visibility: int = HIDDEN_S,
    ) -> None:
        self._url, self._dead_letters, self.hidden_s = url, dead_letters, visibility
        self._sqs = Service("sqs", region or region_of(url), endpoint_url, wait_s=SQS_WAIT_S)
        self._label = f"queue {last_part(url)}"

    async def open(self) -> None:
        """Raises AwsError, also for a queue that would give bad messages again and again."""
        doing = f"read the settings of {self._label}"
        answer = await self._sqs.call("get_queue_attributes", doing, QueueUrl=self._url, AttributeNames=["All"])
        if self._dead_letters is None and "RedrivePolicy" not in answer.get("Attributes", {}):
            raise AwsError(
                f"{self._label} has no redrive policy, so that bad messages would come again and again: give it one, "
                "or name a queue for them as dead_letters",
                "UnfitQueue",
                Trouble.UNUSABLE,
            )

    async def receive(self) -> list[Received]:
        answer = await self._sqs.call(
            "receive_message",
            f"receive from {self._label}",
            QueueUrl=self._url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=SQS_WAIT_S,
            VisibilityTimeout=int(self.hidden_s),
            MessageAttributeNames=["All"],
        )
        return [_received(message) for message in answer.get("Messages", ())]

    async def remove(self, messages: Sequence[Received]) -> None:
        entries = [{"Id": str(at), "ReceiptHandle": message.receipt} for at, message in enumerate(messages)]
        await self._batch("delete_message_batch", f"remove messages of {self._label}", entries)

    async def hide(self, messages: Sequence[Received], seconds: float) -> None:
        entries = [
            {"Id": str(at), "ReceiptHandle": message.receipt, "VisibilityTimeout": int(seconds)}
            for at, message in enumerate(messages)
        ]
        await self._batch("change_message_visibility_batch", f"hide messages of {self._label}", entries)

    async def bury(self, message: Received, reason: str) -> None:
        """Move a message to the queue of dead letters. If it dies in between, the letter may be there twice.

        A message that is too large for that queue is shortened. If the queue still refuses it, it stays in this queue.
        """
        if self._dead_letters is None:
            return await self.hide([message], BAD_AGAIN_S)
        try:
            await self._send_letter(self._dead_letters, message, reason)
        except AwsError as error:
            if error.trouble is not None:
                raise
            warn_throttled(log, "a bad message stays in %s: %s", self._label, error)
            return await self.hide([message], BAD_AGAIN_S)
        await self.remove([message])

    async def _send_letter(self, queue: str, message: Received, reason: str) -> None:
        try:
            await self._send(queue, message, reason)
        except AwsError as error:
            if not too_large(error):
                raise
            await self._send(queue, _shortened(message), reason)

    async def _send(self, queue: str, message: Received, reason: str) -> None:
        texts = {**dict(list(message.attributes.items())[:8]), "penstock-reason": reason[:REASON]}
        texts["penstock-message-id"] = message.id
        attributes = {name: {"DataType": "String", "StringValue": text} for name, text in texts.items() if text}
        fifo = {"MessageGroupId": "dead", "MessageDeduplicationId": message.id}
        await self._sqs.call(
            "send_message",
            f"send to queue {last_part(queue)}",
            QueueUrl=queue,
            MessageBody=message.body,
            MessageAttributes=attributes,
            **(fifo if queue.endswith(".fifo") else {}),
        )

    def close(self) -> None:
        self._sqs.close()

    async def _batch(self, operation: str, doing: str, entries: list[dict[str, Any]]) -> None:
        """Make one call for all entries. An outdated receipt is no error: the message is received again, or is gone.

        Raises AwsError if an entry failed by the server's fault.
        """
        if not entries:
            return
        answer = await self._sqs.call(operation, doing, QueueUrl=self._url, Entries=entries)
        for failed in answer.get("Failed", ()):
            if not failed.get("SenderFault"):
                raise refusal(doing, "sqs", failed.get("Code", ""), failed.get("Message", ""))
            warn_throttled(log, "cannot %s: %s", doing, failed.get("Code"))


def _shortened(message: Received) -> Received:
    """Returns the beginning of a message, with the length (characters) of its whole body as an attribute."""
    attributes = {"penstock-shortened": str(len(message.body))}
    attributes |= {name: text[:SHORT_ATTRIBUTE] for name, text in message.attributes.items()}
    return replace(message, body=message.body[:SHORT_BODY], attributes=attributes)


def _received(raw: dict[str, Any]) -> Received:
    attributes = {
        name: value["StringValue"] for name, value in raw.get("MessageAttributes", {}).items() if "StringValue" in value
    }
    return Received(raw["MessageId"], raw["Body"], attributes, raw["ReceiptHandle"])


#: Receives that are worked on at a time.
PARALLEL: Final = 4
#: Longest time (s) for giving a message back when the process stops.
BACK_S: Final = 5.0
#: Errors of `handle` for a server that is away or full; the message is handled again.
RETRIED: Final = (*FAILURES, SubmitFailed)


class Consumer:
    """Consumes one inbox. `handle`: processes a message; it may be called again for the same message.

    `removed`: called with messages after their removal, unless the process dies in between. `buried`: called after a
    bad message was buried.
    """

    def __init__(
        self,
        name: str,
        inbox: Inbox,
        handle: Callable[[Received], Awaitable[None]],
        removed: Callable[[Sequence[Received]], Awaitable[None]] | None = None,
        buried: Callable[[], None] | None = None,
    ) -> None:
        self._name, self._inbox, self._handle, self._removed, self._buried = name, inbox, handle, removed, buried
        self._receives = ""
        self._stalled: dict[str, str] = {}
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def trouble(self) -> str:
        """The reason why nothing is received now; empty while messages are received."""
        return next(iter(self._stalled.values()), self._receives)

    async def run(self) -> None:
        """Consume until cancelled, then give back what is not done. Raises what the inbox raises, but for a server
        that is away."""
        await self._inbox.open()
        places, working = asyncio.Semaphore(PARALLEL), set[asyncio.Task[None]]()
        try:
            while True:
                await places.acquire()
                await self._flows.wait()
                if messages := await self._received():
                    task = asyncio.create_task(self._work(messages))
                    working.add(task)
                    task.add_done_callback(working.discard)
                    task.add_done_callback(lambda _: places.release())
                else:
                    places.release()
        finally:
            await ended(working)

    async def _received(self) -> list[Received]:
        """Returns the next messages. A call that waits at the server goes on when this is cancelled; its messages are
        then given back."""
        call = asyncio.ensure_future(self._inbox.receive())
        try:
            messages = await asyncio.shield(call)
        except asyncio.CancelledError:
            with suppress(*FAILURES):
                await self._back(await call)
            raise
        except FAILURES as error:
            if trouble(error) is not Trouble.AWAY:
                raise
            self._receives = error_text(error)
            warn_throttled(log, "cannot receive, trying again: %s", error)
            await sleep_unless_cancelled(1.0)
            return []
        self._receives = ""
        return messages

    async def _work(self, messages: Sequence[Received]) -> None:
        """Handle messages of one receive, and remove those that are done."""
        unfinished = {message.id: message for message in messages}
        hiding = asyncio.create_task(self._keep_hidden(unfinished))
        try:
            await asyncio.gather(*(self._handled(message, unfinished) for message in messages))
            if unfinished:
                done = list(unfinished.values())
                await self._until_done(done[0].id, partial(self._inbox.remove, done))
                unfinished.clear()
                if self._removed is not None:
                    with suppress(*FAILURES):
                        await self._removed(done)
        except asyncio.CancelledError:
            await self._back(list(unfinished.values()))
            raise
        finally:
            hiding.cancel()

    async def _handled(self, message: Received, unfinished: dict[str, Received]) -> None:
        """Handle a message. A bad message goes to the dead letters, and is removed from `unfinished`."""
        try:
            return await self._until_done(message.id, partial(self._handle, message))
        except BadMessage as bad:
            reason = str(bad)
            log.warning("%s: message %s is refused: %s", self._name, shown(message.id), reason)
        except Exception as error:  # a bug here must not make a message that is tried for ever
            reason = f"{type(error).__name__} in the sources process"
            log.exception("message %s of %s failed here", shown(message.id), self._name)
        await self._until_done(message.id, partial(self._inbox.bury, message, reason))
        del unfinished[message.id]
        if self._buried is not None:
            self._buried()

    async def _until_done(self, message_id: str, work: Callable[[], Awaitable[None]]) -> None:
        """Call `work` until it succeeds. While a server is away, nothing more is received."""
        attempt = 0
        try:
            while True:
                try:
                    return await work()
                except RETRIED as error:
                    self._stalled[message_id] = error_text(error)
                    self._flows.clear()
                    warn_throttled(log, "a message is held until this is over: %s", error)
                await sleep_unless_cancelled(backoff(attempt))
                attempt += 1
        finally:
            self._stalled.pop(message_id, None)
            if not self._stalled:
                self._flows.set()

    async def _keep_hidden(self, messages: dict[str, Received]) -> None:
        while True:
            await sleep_unless_cancelled(self._inbox.hidden_s / 2)
            try:
                await self._inbox.hide(list(messages.values()), self._inbox.hidden_s)
            except FAILURES as error:  # others may receive them, too: what they make is the same
                warn_throttled(log, "messages are not hidden from others: %s", error)

    async def _back(self, messages: Sequence[Received]) -> None:
        """Give messages back. If the server is away, they come back by themselves."""
        with suppress(*FAILURES):
            async with asyncio.timeout(BACK_S):
                await self._inbox.hide(messages, 0)
