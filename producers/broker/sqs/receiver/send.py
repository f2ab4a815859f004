"""The requests of a worker process for the messages that it has received, on one thread: the `Sender`.

    put_down, Maintenance ─▶ Request: a generator of steps ─▶ Sender: steps of one kind share a call ─▶ store, SQS

One thread sends all, so a renewal never follows a hand-back. A step is a script's `Call`, or a `BatchEntry` of a
request to SQS; docs/how/sqs.md has their order. A failed step is tried again, so each may be done twice. A generator
gets a step's answer: that of the script; of SQS, whether it does not know the message any more. It returns the answer
of `put_down`. A delete waits a while for others, to share their request; no other step waits. `Maintenance` adds
requests of its own: renewals, due messages, messages of dead workers.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from redis import Redis
from redis.exceptions import RedisError

from producers.broker.memory.message import Unusable, read
from producers.broker.sqs.address import Address
from producers.broker.sqs.keys import Entry, member
from producers.broker.sqs.queues import Queues
from producers.broker.sqs.receiver import flight
from producers.broker.sqs.receiver.flight import BATCH, DELETED, LONGEST_S, InFlight, ReceivedMessage
from producers.broker.values import PutDown
from producers.connection.aws import AwsError, AwsMissing, refusal
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, run_many
from producers.connection.trouble import Trouble

logger = logging.getLogger(__name__)

#: Longest delay (s) of a message or a hand-back on SQS; the store keeps what is delayed for longer.
MAX_DELAY_S: Final = 900.0
#: The same of what has no entry in the index, where its delay could not be seen.
MAX_UNSEEN_S: Final = 30.0
#: Time (s) before the end of SQS's longest receive at which a message is replaced by a copy.
REPLACE_BEFORE_S: Final = 1800.0
#: A message that no thread takes goes back after so long (s).
KEEP_S: Final = 2.0
#: Interval (s) of looking for kept messages that are due, and how many are sent at a time.
DUE_S: Final = 1.0
DUE: Final = 10
#: Longest wait (s) of a delete for others.
LINGER_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0
#: Codes for a message that SQS does not have, or not in flight: a retry does not help.
GONE: Final = frozenset(
    {"ReceiptHandleIsInvalid", "InvalidParameterValue", "AWS.SimpleQueueService.InvalidReceiptHandle"}
)
NOT_IN_FLIGHT: Final = frozenset({"MessageNotInflight", "AWS.SimpleQueueService.MessageNotInflight"})


class Action(Enum):
    DELETE = "sqs:DeleteMessage"
    SHOW = "sqs:ChangeMessageVisibility"
    SEND = "sqs:SendMessage"


_DOING: Final = {Action.DELETE: "delete from", Action.SHOW: "change visibilities in", Action.SEND: "send to"}


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A message's part of a request. `seconds`: SHOW hides it for so long, SEND delays it by so long."""

    action: Action
    list: str
    receipt_of: ReceivedMessage | InFlight | None = None
    body: str = ""
    group: str = ""
    seconds: float = 0.0
    renews: bool = False

    @property
    def lingers(self) -> bool:
        """Whether it may wait for others, to share a request."""
        return self.action is Action.DELETE

    @property
    def needless(self) -> bool:
        """Whether SQS has no message for it any more, or it would renew a message that is on its way back."""
        if self.receipt_of is None:
            return False
        leaving = isinstance(self.receipt_of, ReceivedMessage) and self.receipt_of.leaving
        return not self.receipt_of.receipt or (self.renews and leaving)

    @property
    def arguments(self) -> dict[str, Any]:
        """As boto3 takes it, without its Id."""
        if self.receipt_of is None:
            return {"MessageBody": self.body, "group": self.group, "DelaySeconds": int(self.seconds)}
        more = {"VisibilityTimeout": int(self.seconds)} if self.action is Action.SHOW else {}
        return {"ReceiptHandle": self.receipt_of.receipt, **more}


Steps = Generator[Call | BatchEntry, Any, PutDown]

# ---- requests to SQS ------------------------------------------------------------------------------------------------


class SqsAccess(Protocol):
    """SQS and its queues."""

    @property
    def sqs(self) -> Any: ...

    @property
    def queues(self) -> Queues: ...


def send_batch(to: SqsAccess, name: str, action: Action, entries: Sequence[dict[str, Any]]) -> dict[int, AwsError]:
    """One batch request to a list's queue. Returns the refused entries' errors by index. Raises AwsError."""
    with_ids = [{"Id": str(index), **entry} for index, entry in enumerate(entries)]
    with to.queues.aws_errors(_DOING[action], name, action.value):
        url = to.queues.url(name)
        if action is Action.DELETE:
            answer = to.sqs.delete_message_batch(QueueUrl=url, Entries=with_ids)
        elif action is Action.SHOW:
            answer = to.sqs.change_message_visibility_batch(QueueUrl=url, Entries=with_ids)
        else:
            sendable = [_sendable(entry, url) for entry in with_ids]
            answer = to.sqs.send_message_batch(QueueUrl=url, Entries=sendable)
    doing = f"{_DOING[action]} {to.queues.called(name)}"
    refused = {}
    for failure in answer.get("Failed", ()):
        code = failure.get("Code", "")
        error = refusal(doing, action.value, code, failure.get("Message", ""))
        if error.trouble is None and code not in GONE | NOT_IN_FLIGHT and not failure.get("SenderFault", True):
            error = AwsError(str(error), code, Trouble.AWAY)
        refused[int(failure["Id"])] = error
    return refused


def _sendable(entry: dict[str, Any], url: str) -> dict[str, Any]:
    """FIFO queues take no delay of a message, and drop for five minutes what has the id of an earlier one."""
    group = entry.pop("group")
    if url.endswith(".fifo"):
        entry.pop("DelaySeconds")
        entry |= {"MessageGroupId": group or str(uuid.uuid4()), "MessageDeduplicationId": str(uuid.uuid4())}
    elif group:
        entry["MessageGroupId"] = group
    return entry


# ---- ways out -------------------------------------------------------------------------------------------------------


def ack(message: ReceivedMessage, reason: str = "", *, settled: bool = False) -> Steps:
    """Delete a message that is done; with a reason, keep it as a dead letter."""
    route = "letter" if reason else "done"
    answer = yield flight.out(message, route, kept=message.raw if reason else "", reason=reason, settled=settled)
    if answer != 1:
        return PutDown.UNSETTLED if answer == -1 else PutDown.GONE
    yield BatchEntry(Action.DELETE, message.list, message)
    answer = yield flight.down(message, deleted=True)
    return PutDown.DONE if answer else PutDown.GONE


def back(message: ReceivedMessage, delay: float, *, fifo: bool, worn: bool) -> Steps:
    """Return a message to its own queue. `worn`: it is so old that its queue would soon drop it."""
    ends = message.received + LONGEST_S - REPLACE_BEFORE_S < time.monotonic() + delay
    if delay > (MAX_DELAY_S if message.member else MAX_UNSEEN_S) or (delay > 0 and ends):
        return (yield from _keep(message, delay))
    answer = yield flight.out(message, "back", delay=delay)
    if answer != 1:
        return PutDown.GONE
    if worn and not fifo:
        yield _copy(message, delay)
        yield BatchEntry(Action.DELETE, message.list, message)
    elif (yield BatchEntry(Action.SHOW, message.list, message, seconds=delay)):
        yield _copy(message, delay)  # SQS has none: a failover lost that it was deleted
    yield flight.down(message, deleted=False)
    return PutDown.DONE


def _copy(message: ReceivedMessage, delay: float = 0.0, to: str = "") -> BatchEntry:
    body = message.raw.decode(errors="surrogateescape")
    return BatchEntry(Action.SEND, to or message.list, None, body, message.group, delay)


def _keep(message: ReceivedMessage, delay: float) -> Steps:
    kept = flight.kept_message(message.list, message.raw, message.group)
    answer = yield flight.out(message, "delay", delay=delay, kept=kept)
    if answer != 1:
        return PutDown.GONE
    yield BatchEntry(Action.DELETE, message.list, message)
    yield flight.down(message, deleted=False)
    return PutDown.DONE


def move(message: ReceivedMessage, to: str) -> Steps:
    """Move a message to another list."""
    answer = yield flight.out(message, "back", to=to)
    if answer != 1:
        return PutDown.GONE
    yield _copy(message, to=to)
    yield BatchEntry(Action.DELETE, message.list, message)
    yield flight.down(message, deleted=False)
    return PutDown.DONE


def renew(message: ReceivedMessage, seconds: float) -> Steps:
    """Hide a message for as long again. If SQS does not have it in flight here, its new receiver renews it."""
    began = time.monotonic()
    gone = yield BatchEntry(Action.SHOW, message.list, message, seconds=seconds, renews=True)
    message.until = math.inf if gone else began + seconds
    message.renewing = False
    return PutDown.DONE


def reap(incarnation: str, entry: InFlight) -> Steps:
    """Take the route that REAP chose for a message that a dead worker had in flight."""
    deleted = entry.out in DELETED
    gone = yield BatchEntry(Action.DELETE if deleted else Action.SHOW, entry.list, entry)
    if gone and not deleted and entry.member:  # SQS has none: a failover lost that it was deleted
        body = Entry.parse(entry.member).message(entry.list).envelope()
        yield BatchEntry(Action.SEND, entry.list, None, body, entry.group)
    yield flight.reaped(incarnation, [entry.field])
    return PutDown.DONE


def renew_receipt(message: ReceivedMessage) -> Steps:
    """Replace a message by a copy: SQS hides none for longer than 12 h. Its receiver finds the task busy."""
    if message.member:
        yield flight.sent(message.list, [(message.member, message.at)])
    yield _copy(message, MAX_DELAY_S)
    yield BatchEntry(Action.DELETE, message.list, message)
    message.receipt = ""
    yield flight.note(message.incarnation, message.list, [(message, True)])
    return PutDown.DONE


def resend(queue: str, entry: bytes) -> Steps:
    """Send a kept message whose delay is over, before the store drops it."""
    kept = json.loads(entry)
    with suppress(Unusable):
        message = read(flight.body_of(entry))
        if indexed := member(message):
            yield flight.sent(kept["list"], [(indexed, message.at)])
    yield BatchEntry(Action.SEND, kept["list"], None, kept["body"], kept.get("group", ""))
    yield flight.due(queue, 0, sent=[entry])
    return PutDown.DONE


# ---- the thread -----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Request:
    """Steps under way. `message`: the one that they put down, if any. `step`: the next, since `at`, not before `after`
    (monotonic)."""

    steps: Steps
    step: Call | BatchEntry | None = None
    at: float = 0.0
    after: float = 0.0
    failures: int = 0
    answer: PutDown | None = None
    """Set when it has ended."""
    message: ReceivedMessage | None = None

    def advance(self, answer: Any = None) -> None:
        self.at, self.failures, self.after = time.monotonic(), 0, 0.0
        try:
            self.step = self.steps.send(answer)
        except StopIteration as end:
            self.step, self.answer = None, end.value


class Owner(SqsAccess, Protocol):
    """The receiver, as its sender and maintenance need it. The methods are called under its lock, `changed`."""

    address: Address
    redis: Redis
    changed: threading.Condition
    closed: bool
    served: list[str]
    sender: Sender

    @property
    def messages(self) -> list[ReceivedMessage]: ...

    def buffered(self) -> list[ReceivedMessage]: ...

    def give_back_unfit(self, message: ReceivedMessage) -> None: ...

    def serves(self, now: float) -> bool: ...

    def tend(self, now: float) -> None:
        """Adds the requests of its maintenance that are due."""

    def tend_at(self, now: float) -> float:
        """When `tend` has something to do (monotonic)."""

    def ended(self, request: Request) -> None: ...


class Sender:
    """Performs requests on a thread, which starts with the first one."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._changed = owner.changed
        self._thread: threading.Thread | None = None
        self.requests: list[Request] = []
        self._flushing = False

    def add(self, *requests: Request) -> None:
        """Add requests, under the owner's lock. Their first steps are taken soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-sqs-sender", daemon=True)
            self._thread.start()
        for request in requests:
            request.advance()
            if request.answer is None:
                self.requests.append(request)
        self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all requests have ended, without lingering. Returns False if they have not in time."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self.requests, timeout)
            finally:
                self._flushing = False

    def _run(self) -> None:
        while True:
            try:
                if not (ready := self._wait()):
                    return
                self._step(ready)
            except Exception:  # an unforeseen error of one step must not stop the others
                logger.exception("A request to SQS failed, going on")
                time.sleep(LONGEST_PAUSE_S)

    def _wait(self) -> list[Request]:
        """Wait for the requests that are due next. Returns none once the owner is closed and all are done."""
        with self._changed:
            while not (ready := self._ready(time.monotonic())):
                if self._owner.closed:
                    return []
                self._changed.wait(self._pause())
            return ready

    def _ready(self, now: float) -> list[Request]:
        """Requests whose next step is due. The owner's maintenance may add some."""
        self._owner.tend(now)
        due = [request for request in self.requests if request.after <= now]
        lingering: dict[str, list[Request]] = {}
        for request in due:
            step = request.step
            if isinstance(step, BatchEntry) and step.lingers and not self._owner.address.fifo:  # its group waits
                lingering.setdefault(step.list, []).append(request)
        flushing = self._flushing or self._owner.closed
        waiting = [
            request
            for requests in lingering.values()
            if not flushing and len(requests) < BATCH and requests[0].at + LINGER_S > now
            for request in requests
        ]
        return [request for request in due if request not in waiting]

    def _pause(self) -> float | None:
        now = time.monotonic()
        times = [request.after if request.after > now else request.at + LINGER_S for request in self.requests]
        times.append(self._owner.tend_at(now))
        soonest = min(times)
        return None if soonest == math.inf else max(0.001, soonest - now)

    def _step(self, ready: Sequence[Request]) -> None:
        calls = [request for request in ready if isinstance(request.step, Call)]
        if calls:
            self._call_store(calls)
        kinds: dict[tuple[str, Action], list[Request]] = {}
        for request in ready:
            if isinstance(request.step, BatchEntry):
                kinds.setdefault((request.step.list, request.step.action), []).append(request)
        for (name, action), requests in kinds.items():
            for start in range(0, len(requests), BATCH):
                self._call_sqs(name, action, requests[start : start + BATCH])

    def _call_store(self, requests: Sequence[Request]) -> None:
        calls = [request.step for request in requests if isinstance(request.step, Call)]
        try:
            answers = run_many(self._owner.redis, calls)
        except (RedisError, OSError) as error:
            warn_throttled(logger, "The store is away, messages on SQS are put down later: %s", error)
            self._retry_later(requests)
            return
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Exception):
                warn_throttled(logger, "A message's books cannot be changed, trying again: %s", answer)
                self._retry_later([request])
            else:
                self._advance(request, answer)

    def _call_sqs(self, name: str, action: Action, requests: Sequence[Request]) -> None:
        batch: list[Request] = []
        entries: list[dict[str, Any]] = []
        needless: list[Request] = []
        for request in requests:
            if isinstance(request.step, BatchEntry) and not request.step.needless:
                batch.append(request)
                entries.append(request.step.arguments)
            else:
                needless.append(request)
        for request in needless:
            self._advance(request, False)
        try:
            refused = send_batch(self._owner, name, action, entries) if batch else {}
        except (AwsError, RedisError, OSError) as error:
            if isinstance(error, AwsError) and error.trouble is None and not isinstance(error, AwsMissing):
                self._call_sqs_alone(name, action, batch, error)
                return
            warn_throttled(logger, "Messages on SQS are put down later: %s", error)
            self._retry_later(batch)
            return
        for index, request in enumerate(batch):
            refusal = refused.get(index)
            if refusal is not None and refusal.trouble is not None:
                warn_throttled(logger, "A message on SQS is put down later: %s", refusal)
                self._retry_later([request])
            elif refusal is not None and action is Action.SEND:
                self._refuse(request, refusal)
            else:
                self._advance(request, refusal is not None and refusal.code in GONE)

    def _call_sqs_alone(self, name: str, action: Action, requests: Sequence[Request], error: AwsError) -> None:
        """Send each message of a refused batch alone: SQS refused it for one of them."""
        if len(requests) > 1:
            for request in requests:
                self._call_sqs(name, action, [request])
        elif action is Action.SEND:
            self._refuse(requests[0], error)
        else:
            self._advance(requests[0], True)

    def _refuse(self, request: Request, error: AwsError) -> None:
        """End a request whose message SQS does not take, without deleting it: its next receiver tries again."""
        warn_throttled(logger, "A message cannot be sent, it comes back when its visibility is over: %s", error)
        with self._changed:
            request.steps.close()
            request.answer = PutDown.GONE
            self._finish(request)

    def _advance(self, request: Request, answer: Any) -> None:
        with self._changed:
            try:
                request.advance(answer)
            except Exception:
                logger.exception("A message on SQS cannot be put down: it comes back when its visibility is over")
                request.answer = PutDown.GONE
            self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.answer is not None:
            self.requests.remove(request)
            self._owner.ended(request)
        self._changed.notify_all()

    def _retry_later(self, requests: Sequence[Request]) -> None:
        with self._changed:
            for request in requests:
                request.failures += 1
                request.after = time.monotonic() + min(LONGEST_PAUSE_S, 0.1 * 2**request.failures)


# ---- maintenance ----------------------------------------------------------------------------------------------------


class Maintenance:
    """Adds the requests that no call asks for: renewals, due messages, hand-backs, messages of dead workers.

    Its methods are called under the owner's lock, except `reap`.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._half = owner.address.visibility / 2
        self._due_at = 0.0
        self._sending: set[bytes] = set()
        self._reaping: set[tuple[str, str]] = set()

    def tend(self, now: float) -> None:
        """Give back messages that no thread takes, renew the others, look for due ones."""
        owner = self._owner
        for message in owner.buffered():
            if message.received + KEEP_S <= now and not message.leaving:
                owner.give_back_unfit(message)
        for message in self._renewable():
            ending = now > message.received + LONGEST_S - REPLACE_BEFORE_S
            if message.delivered and not owner.address.fifo and ending:
                message.renewing = True
                owner.sender.add(Request(renew_receipt(message)))
            elif now >= self._renew_at(message):
                message.renewing = True
                owner.sender.add(Request(renew(message, owner.address.visibility)))
        if owner.serves(now) and now >= self._due_at:
            self._due_at = now + DUE_S
            owner.sender.add(Request(self._look_for_due()))

    def next_at(self, now: float) -> float:
        """When `tend` has something to do (monotonic)."""
        times = [message.received + KEEP_S for message in self._owner.buffered()]
        times += [self._renew_at(message) for message in self._renewable()]
        if self._owner.serves(now):
            times.append(self._due_at)
        return min(times, default=math.inf)

    def _renew_at(self, message: ReceivedMessage) -> float:
        """When to renew: at half of its visibility, which is shorter at first."""
        return message.until - min(self._half, (message.until - message.received) / 2)

    def _renewable(self) -> list[ReceivedMessage]:
        return [m for m in self._owner.messages if m.receipt and not (m.leaving or m.lost or m.renewing)]

    def _look_for_due(self) -> Steps:
        for queue in self._owner.served:
            entries = yield flight.due(queue, DUE)
            fresh = [entry for entry in entries if entry not in self._sending]
            self._sending.update(fresh)
            self._owner.sender.add(*(Request(self._resend(queue, entry)) for entry in fresh))
        return PutDown.DONE

    def _resend(self, queue: str, entry: bytes) -> Steps:
        try:
            return (yield from resend(queue, entry))
        finally:
            self._sending.discard(entry)

    def reap(self, incarnation: str, entries: Sequence[InFlight], timeout: float) -> None:
        """Perform the requests of REAP. Waits for them at most `timeout` seconds; they go on then."""
        if not entries:
            return
        with self._owner.changed:
            fresh = [entry for entry in entries if (incarnation, entry.field) not in self._reaping]
            requests = [Request(self._reap(incarnation, entry)) for entry in fresh]
            self._reaping.update((incarnation, entry.field) for entry in fresh)
            self._owner.sender.add(*requests)
            self._owner.changed.wait_for(lambda: all(request.answer for request in requests), timeout)

    def _reap(self, incarnation: str, entry: InFlight) -> Steps:
        try:
            return (yield from reap(incarnation, entry))
        finally:
            self._reaping.discard((incarnation, entry.field))
