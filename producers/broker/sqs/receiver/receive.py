"""A worker process's messages of SQS, which its consumers share: received, with the worker, or on their way out.

One lock guards a `Receiver`. No thread waits for a server under it. A `Poller` for each list receives for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, Final

from redis import Redis
from redis.exceptions import RedisError

from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, is_celery
from producers.broker.sqs.queues import RENEW_BEFORE_S, Queues
from producers.broker.sqs.receiver import flight, send
from producers.broker.sqs.receiver.buffer import Blocked, Buffer, Demand, Line, places, poll_size, read_lines
from producers.broker.sqs.receiver.flight import InFlight, ReceivedMessage, parse_received, stray_message
from producers.broker.sqs.receiver.send import Action, Maintenance, Request, Sender, Steps, send_batch
from producers.broker.values import Ack, Back, Credit, Fetched, PutDown, Rules, sane_weights
from producers.connection import aws
from producers.connection.aws import AwsError
from producers.connection.connect import connect
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run
from producers.connection.trouble import Trouble, error_text
from producers.contract.levels import split

logger = logging.getLogger(__name__)

#: Without a fetch for so long (s), no list is polled.
FRESH_S: Final = 3.0
#: A message that was not taken blocks its list for so long (s) at most: it does not fit; or it was passed over.
UNFIT_S: Final = 60.0
PASSED_S: Final = 10.0
ACCEPTED_S: Final = 1.0 + aws.CONNECT_S
#: SQS's longest poll (s): 720 requests an hour for four empty lists.
WAIT_S: Final = 20
#: The poll (s) after a failure: its answer shows that the failure has passed.
AGAIN_S: Final = 1
#: First visibility timeout (s) of a message, until its first renewal. The poll of a killed process goes on at SQS, and
#: receives messages for nobody.
FIRST_S: Final = 20
RETRY_S: Final = 0.2
#: Longest pause (s) after a failure that may pass by itself; and after one that an operator has to repair.
AWAY_S: Final = 5.0
REFUSED_S: Final = 15.0
#: Share of a message's visibility within which it is entered in flight, or else left to reappear.
NOTE_WITHIN: Final = 0.6


class Receiver:
    """The messages of a worker process. `queues`: a worker's, its own pool's first, which has none on SQS; `home`: its
    version's."""

    def __init__(self, address: Address, queues: Sequence[str], store_url: str, home: str) -> None:
        self.address = address
        self.redis: Redis = connect(store_url)
        self.served = [queue for queue in queues if _is_polled(queue, queues, home, address)]
        self.lines = {name: Line(name, queue, rank) for queue in self.served for name, rank in places(queue)}
        self.changed = threading.Condition()
        self.closed = False
        self.passed: frozenset[str] = frozenset()
        """Queues that are not polled for now."""
        self.users = 0
        self.pokes: list[Callable[[], None]] = []
        self._buffer = Buffer(self.served, address.fifo)
        self._received: dict[str, ReceivedMessage] = {}
        self._delivered: dict[str, ReceivedMessage] = {}
        self._buried: list[Fetched] = []
        self._demand: Demand | None = None
        self._finished: deque[float] = deque()
        self._pollers: list[Poller] = []
        self.sender = Sender(self)
        self.maintenance = Maintenance(self)

    @cached_property
    def sqs(self) -> Any:
        """The sender's client."""
        return aws.client("sqs", self.address.region, self.address.endpoint_url)

    @cached_property
    def polling_sqs(self) -> Any:
        """The pollers'."""
        return aws.client("sqs", self.address.region, self.address.endpoint_url, wait_s=WAIT_S)

    @cached_property
    def queues(self) -> Queues:
        return Queues(self.sqs, self.address, self.redis)

    # ---- fetch ----------------------------------------------------------------------------------------------------

    def fetch(self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules) -> list[Fetched] | None:
        """As `producers.broker.base.Consumer.fetch`, from received messages. Also updates the demand of the pollers."""
        with self.changed:
            self.give_back([m for m in self._received.values() if m.incarnation != incarnation and not m.delivered])
            since = {line.name: line.since for line in self.lines.values()}
            fetched, remaining = self._buffer.choose(incarnation, uuids, credit, rules, since)
            for message in self._received.values():
                if message.uuid and not message.delivered:
                    self._delivered[message.uuid] = message
            chosen = [m for f in fetched if (m := self._delivered.get(f.uuid)) and not m.delivered]
        answer = run(self.redis, flight.take(incarnation, list(self.lines), chosen))
        if answer == flight.LOST:
            self.lose(incarnation)
            return None
        moved = self._moved_on()
        with self.changed:
            for message in chosen:
                message.delivered = True
            read_lines(self.lines, answer)
            self._update_demand(incarnation, remaining, rules, moved)
            buried, self._buried = self._buried, []
            self._start_polling()
            self.changed.notify_all()
        return fetched + buried

    def _update_demand(self, incarnation: str, remaining: Credit, rules: Rules, moved: set[str]) -> None:
        now = time.monotonic()
        while self._finished and self._finished[0] < now - 1:
            self._finished.popleft()
        demand = Demand(incarnation, remaining, rules, now, *self._buffer.amounts(), len(self._finished))
        self._demand = demand
        for line in self.lines.values():
            if (b := line.blocked) and (demand.fits(line.rank, b) or now > b.until or line.name in moved):
                line.blocked = None

    def _moved_on(self) -> set[str]:
        """Lists whose first message, which did not fit here, was taken by another worker."""
        blocked = {line.name: line.blocked for line in self.lines.values() if line.blocked}
        elsewhere = {name: b for name, b in blocked.items() if b.member and b.mid not in self._received}
        return {name for name, b in elsewhere.items() if self.redis.zscore(keys.waiting(name), b.member) is None}

    def next_poll(self, line: Line) -> tuple[str, int]:
        """Wait until a list is to be polled. Returns the incarnation and the number of messages; 0: the worker ends."""
        with self.changed:
            while not self.closed:
                now, pause = time.monotonic(), inf
                demand = self._demand
                if demand is not None and self.serves(now) and line.queue not in self.passed:
                    lines = [other for other in self.lines.values() if other.queue not in self.passed]
                    count, pause = poll_size(line, lines, demand, now, time.time() * 1000)
                    if count:
                        line.polling = inf
                        return demand.incarnation, count
                self.changed.wait(None if pause == inf else pause)
            return "", 0

    # ---- received -------------------------------------------------------------------------------------------------

    def register(self, received: Sequence[ReceivedMessage]) -> list[tuple[ReceivedMessage, bool]]:
        """Add received messages. Returns each with whether it is a copy: then it is the existing message."""
        messages = []
        with self.changed:
            for message in received:
                existing = self._received.get(message.mid)
                if existing is None or existing.leaving or existing.lost:  # given back, or another incarnation's
                    self._received[message.mid] = message
                    messages.append((message, False))
                else:
                    existing.receipt, existing.until = message.receipt, message.until
                    messages.append((existing, True))
        return messages

    def forget(self, registered: Sequence[tuple[ReceivedMessage, bool]]) -> None:
        """Drop messages that were not entered in flight."""
        with self.changed:
            for message, is_copy in registered:
                if not is_copy:
                    self._drop(message)

    def admit(self, registered: Sequence[tuple[ReceivedMessage, bool]], returns: Sequence[int]) -> None:
        """Make messages that are in flight available. `returns`: redeliveries of each whose worker died."""
        with self.changed:
            demand = self._demand
            for (message, is_copy), count in zip(registered, returns, strict=True):
                if is_copy:
                    continue
                if message.sent is None:
                    buried = Fetched("", message.queue, message.rank, message.raw, buried=message.reason)
                    self._buried.append(buried)
                    self._leave(message, send.ack(message, message.reason))
                elif demand is None or demand.incarnation != message.incarnation:
                    self.give_back([message])
                else:
                    self._buffer.add(message, int(count), demand.rules)
            if demand is not None:
                demand.seqs, demand.tokens = self._buffer.amounts()
            pokes = list(self.pokes)
            if not pokes:
                self.changed.notify_all()
        for poke in pokes:  # it fetches now, and that wakes the other threads: earlier they would only be in its way
            poke()

    # ---- put down -------------------------------------------------------------------------------------------------

    def put_down(self, outcomes: Sequence[Ack | Back], timeout: float) -> list[PutDown | Exception]:
        """As `producers.broker.base.Consumer.put_down`. Waits for hand-backs; deletes happen soon after."""
        with self.changed:
            results = [self._put_down(outcome) for outcome in outcomes]
            backs = [result for result in results if isinstance(result, Request)]
            if not self.changed.wait_for(lambda: all(request.answer for request in backs), timeout):
                raise ConnectionError(f"SQS or the store did not take {len(backs)} messages back within {timeout:g} s")
            return [result if isinstance(result, PutDown) else result.answer or PutDown.GONE for result in results]

    def _put_down(self, outcome: Ack | Back) -> Request | PutDown:
        message = self._delivered.get(outcome.uuid)
        if message is None or message.incarnation != outcome.incarnation:
            return PutDown.GONE
        if message.leaving:
            request = next((request for request in self.sender.requests if request.message is message), None)
            return request if request is not None and isinstance(outcome, Back) else PutDown.GONE
        if isinstance(outcome, Ack):
            self._finished.append(time.monotonic())
            steps = send.ack(message, outcome.reason, settled=bool(outcome.settled))
            self._leave(message, steps, max(1, outcome.used))
            return PutDown.DONE
        if outcome.to:
            lists = places(outcome.to)
            to = next(name for name, rank in lists if rank == message.rank or is_celery(outcome.to))
            return self._leave(message, send.move(message, to))
        return self._leave(message, self._steps_back(message, outcome.delay))

    def _steps_back(self, message: ReceivedMessage, delay: float = 0.0) -> Steps:
        queue = self.queues.cached(message.list)
        worn = queue is not None and time.time() + delay > message.sent_at + queue.retention - RENEW_BEFORE_S
        return send.back(message, delay, fifo=self.address.fifo, worn=worn)

    def _leave(self, message: ReceivedMessage, steps: Steps, used: int | None = None) -> Request:
        """Put a message on its way out, under the lock. `used`: KV tokens of one that is done, whose group's next
        may be chosen; None: it goes back, as does the rest of its group."""
        message.leaving = True
        request = Request(steps, message=message)
        self.sender.add(request)
        if message.uuid:
            self._forget_returns(message.id)
        self.give_back(self._buffer.drop(message, used))
        return request

    def survived(self, task_ids: Sequence[str]) -> None:
        """As `producers.broker.base.Consumer.survived`, for this process's messages."""
        with self.changed:
            for task_id in task_ids:
                self._forget_returns(task_id)

    def _forget_returns(self, task_id: str) -> None:
        """Forget a task's returns. Messages whose workers died come one at a time, so the next may come now."""
        if self._buffer.server.reaped.pop(task_id, None):
            for line in self.lines.values():
                line.blocked = None if line.blocked and line.blocked.passed else line.blocked

    def give_back(self, messages: Sequence[ReceivedMessage]) -> None:
        for message in messages:
            if not message.leaving:
                self._leave(message, self._steps_back(message))

    def give_back_unfit(self, message: ReceivedMessage) -> None:
        """Give back a message that no thread took, under the lock. Its list is not polled until the message fits, or
        another worker has it."""
        line, now, demand = self.lines[message.list], time.monotonic(), self._demand
        if line.blocked is None:
            blocked = Blocked(message.seqs, message.tokens, message.member, message.mid, now + UNFIT_S)
            if demand is not None and demand.fits(message.rank, blocked):
                blocked.passed, blocked.until = True, now + PASSED_S
            line.blocked = blocked
        self.give_back([message])

    def ended(self, request: Request) -> None:
        """Note that a request has ended, under the lock."""
        message = request.message
        if message is None:
            return
        if request.answer is PutDown.UNSETTLED:
            message.leaving, message.stray = False, True
            return
        self._drop(message)
        self._delivered.pop(message.uuid, None)

    def _drop(self, message: ReceivedMessage) -> None:
        if self._received.get(message.mid) is message:  # else a copy has come since
            del self._received[message.mid]

    def flush(self, timeout: float) -> bool:
        return self.sender.flush(timeout)

    # ---- maintenance ----------------------------------------------------------------------------------------------

    def tend(self, now: float) -> None:
        """As `producers.broker.sqs.receiver.send.Owner.tend`."""
        self.maintenance.tend(now)

    def tend_at(self, now: float) -> float:
        return self.maintenance.next_at(now)

    @property
    def messages(self) -> list[ReceivedMessage]:
        """All messages that are not put down; under the lock."""
        return list(self._received.values())

    def buffered(self) -> list[ReceivedMessage]:
        """The messages that a thread may take; under the lock."""
        return self._buffer.waiting()

    def serves(self, now: float) -> bool:
        """Whether the worker fetches."""
        return self._demand is not None and now - self._demand.at < FRESH_S

    # ---- ends of incarnations -------------------------------------------------------------------------------------

    def lose(self, incarnation: str) -> None:
        """Note that an incarnation's lease is gone. Undelivered messages go back; the others are renewed no more."""
        with self.changed:
            messages = [message for message in self._received.values() if message.incarnation == incarnation]
            for message in messages:
                message.lost = True
            self.give_back([message for message in messages if not message.delivered])
            if self._demand is not None and self._demand.incarnation == incarnation:
                self._demand = None

    def pause(self) -> None:
        """Stop polling, and give back the undelivered messages. The next fetch starts polling again."""
        with self.changed:
            self._demand = None
            self.give_back([message for message in self._received.values() if not message.delivered])

    def strays(self, incarnation: str, entries: Sequence[InFlight], deliveries: Sequence[str]) -> dict[str, str]:
        """UUID -> task id of deliveries that neither the worker nor this receiver has. They may be given back."""
        with self.changed:
            mine = {message.field for message in self._received.values() if not message.stray} | set(deliveries)
            strays = [entry for entry in entries if entry.field not in mine and not entry.field.startswith("m:")]
            for entry in strays:
                if entry.field not in self._delivered and entry.list in self.lines:
                    line = self.lines[entry.list]
                    location = (line.name, line.queue, line.rank)
                    self._delivered[entry.field] = stray_message(incarnation, entry, location)
        return {entry.field: entry.id for entry in strays}

    def set_weights(self, raw: Mapping[Any, Any]) -> dict[str, float]:
        weights = sane_weights(raw)
        with self.changed:
            self._buffer.server.weights = dict(weights)
        return weights

    def faults(self) -> list[str]:
        """The reasons why lists cannot be polled. A poll that waits for its answer counts as accepted."""
        accepted = time.monotonic() - ACCEPTED_S
        with self.changed:
            return [line.error for line in self.lines.values() if line.error and (line.polling or inf) > accepted]

    def _start_polling(self) -> None:
        if not self._pollers and not self.closed:
            self.sender.add()  # starts its thread, which has maintenance from now on
            self._pollers = [Poller(self, line) for line in self.lines.values()]
            for poller in self._pollers:
                poller.start()

    def close(self) -> None:
        """End polling. Waits up to a second for messages on their way back."""
        self.pause()
        self.flush(1.0)
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def _is_polled(queue: str, queues: Sequence[str], home: str, address: Address) -> bool:
    if is_celery(queue):
        return address.celery
    return queue == home or split(queue)[0] != queues[0]


class Poller(threading.Thread):
    """A thread that receives a list's messages by long polls."""

    def __init__(self, receiver: Receiver, line: Line) -> None:
        super().__init__(name=f"penstock-sqs-{line.name.rpartition('#')[2]}", daemon=True)
        self._receiver = receiver
        self._line = line

    def run(self) -> None:
        while True:
            incarnation, count = self._receiver.next_poll(self._line)
            if not count:
                return
            try:
                received = self._receive(incarnation, count)
                if received:
                    self._enter(incarnation, received)
                self._answered(None)
            except (AwsError, RedisError, OSError) as error:
                self._answered(error)
            except Exception as error:  # a thread that ended would leave its list unserved
                logger.exception("Polling %s failed, going on", self._line.name)
                self._answered(error)

    def _answered(self, error: Exception | None) -> None:
        """Note that a poll ended, with an answer or an error."""
        line = self._line
        with self._receiver.changed:
            line.polling, line.entering = None, False
            line.failures = 0 if error is None else line.failures + 1
            line.error = "" if error is None else error_text(error)
            if error is not None:
                mends = getattr(error, "trouble", None) is Trouble.AWAY or not isinstance(error, AwsError)
                longest = AWAY_S if mends else REFUSED_S
                line.retry_at = time.monotonic() + min(longest, RETRY_S * 2 ** min(line.failures, 10))
            self._receiver.changed.notify_all()
        if error is not None:
            warn_throttled(logger, "Cannot poll SQS, trying again: %s", error)

    def _receive(self, incarnation: str, count: int) -> list[ReceivedMessage]:
        receiver, name = self._receiver, self._line.name
        receiver.queues.check(name)
        visibility = min(receiver.address.visibility, FIRST_S)
        with receiver.changed:
            self._line.polling = began = time.monotonic()
            receiver.changed.notify_all()
        with receiver.queues.aws_errors("receive from", name, "sqs:ReceiveMessage"):
            answer = receiver.polling_sqs.receive_message(
                QueueUrl=receiver.queues.url(name),
                MaxNumberOfMessages=count,
                WaitTimeSeconds=WAIT_S if not self._line.failures else AGAIN_S,
                VisibilityTimeout=visibility,
                AttributeNames=["SentTimestamp", "MessageGroupId"],
            )
        until = _shown_at(began, visibility)
        location = (name, self._line.queue, self._line.rank)
        return [parse_received(message, incarnation, location, until) for message in answer.get("Messages", ())]

    def _enter(self, incarnation: str, received: list[ReceivedMessage]) -> None:
        receiver = self._receiver
        with receiver.changed:
            self._line.entering = True
        registered = receiver.register(received)
        try:
            returns = None if receiver.closed else self._note(incarnation, registered)
        except Exception:
            receiver.forget(registered)
            raise
        if returns is not None:
            receiver.admit(registered, returns)
            return
        receiver.forget(registered)
        show = [{"ReceiptHandle": m.receipt, "VisibilityTimeout": 0} for m, is_copy in registered if not is_copy]
        if show:
            send_batch(receiver, self._line.name, Action.SHOW, show)

    def _note(self, incarnation: str, registered: list[tuple[ReceivedMessage, bool]]) -> Any:
        """Enter messages in flight. Returns the redeliveries of each; None if the lease is gone. Raises RedisError once
        their visibility is nearly over."""
        now = time.monotonic()
        until = now + NOTE_WITHIN * (min(message.until for message, _ in registered) - now)
        while True:
            try:
                answer = run(self._receiver.redis, flight.note(incarnation, self._line.name, registered))
                return None if answer == flight.LOST else answer
            except (RedisError, OSError) as error:
                if time.monotonic() > until or self._receiver.closed:
                    raise
                warn_throttled(logger, "The store is away, received messages wait for it: %s", error)
                time.sleep(RETRY_S)


def _shown_at(began: float, visibility: float) -> float:
    """When SQS shows just received messages again: counted from its answer, less a generous time of transfer."""
    return max(began, time.monotonic() - 1.0) + visibility


# ---- the receivers of this process ----------------------------------------------------------------------------------

_receivers: Final[dict[tuple[Any, ...], Receiver]] = {}
_lock: Final = threading.Lock()


def shared_receiver(address: Address, queues: Sequence[str], store_url: str, home: str) -> Receiver:
    """The receiver that the consumers of this process share for an address and a model. A forked process has its own.
    Every user must `release` it."""
    key = (os.getpid(), address, tuple(queues), store_url, home)
    with _lock:
        receiver = _receivers.get(key)
        if receiver is None:
            receiver = _receivers[key] = Receiver(address, queues, store_url, home)
        receiver.users += 1
        return receiver


def release(receiver: Receiver) -> None:
    """End one use of a receiver, and close it with its last user."""
    with _lock:
        receiver.users -= 1
        gone = [key for key, shared in _receivers.items() if shared is receiver and not receiver.users]
        for key in gone:
            del _receivers[key]
    if gone:
        receiver.close()
