"""Receives a list's messages by long polls, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError

from producers.broker.sqs.hold import calls
from producers.broker.sqs.hold.errand import Act
from producers.broker.sqs.hold.held import Held, held_of
from producers.broker.sqs.hold.polls import Line
from producers.broker.sqs.hold.requests import request
from producers.connection.aws import AwsError
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run
from producers.connection.trouble import Trouble, said

if TYPE_CHECKING:
    from producers.broker.sqs.hold.hold import Hold

logger = logging.getLogger(__name__)

#: SQS's longest poll (s): 720 requests an hour for four lists that have nothing.
WAIT_S: Final = 20
#: The poll (s) after a failure: whether that has passed is known when it is answered.
AGAIN_S: Final = 1
#: Hides (s) a message at first, until its first renewal. The poll of a process that was killed goes on at SQS, and
#: takes messages that nobody gets.
FIRST_S: Final = 20
RETRY_S: Final = 0.2
#: Longest pause (s) after a failure that may pass by itself; and after one that an operator has to mend.
AWAY_S: Final = 5.0
UNFIT_S: Final = 15.0
#: Part of a message's visibility within which it is entered in flight, or else left to reappear.
PATIENCE: Final = 0.6


class Poller(threading.Thread):
    def __init__(self, hold: Hold, line: Line) -> None:
        super().__init__(name=f"penstock-sqs-{line.name.rpartition('#')[2]}", daemon=True)
        self._hold = hold
        self._line = line

    def run(self) -> None:
        while True:
            incarnation, count = self._hold.next_poll(self._line)
            if not count:
                return
            try:
                received = self._receive(incarnation, count)
                if received:
                    self._enter(incarnation, received)
                self._said(None)
            except (AwsError, RedisError, OSError) as error:
                self._said(error)
            except Exception as error:  # a thread that ended would leave its list unserved
                logger.exception("Polling %s failed, going on", self._line.name)
                self._said(error)

    def _said(self, error: Exception | None) -> None:
        """The poll was answered, or not."""
        line = self._line
        with self._hold.changed:
            line.polling, line.entering = None, False
            line.failures = 0 if error is None else line.failures + 1
            line.error = "" if error is None else said(error)
            if error is not None:
                mends = getattr(error, "trouble", None) is Trouble.AWAY or not isinstance(error, AwsError)
                longest = AWAY_S if mends else UNFIT_S
                line.retry_at = time.monotonic() + min(longest, RETRY_S * 2 ** min(line.failures, 10))
            self._hold.changed.notify_all()
        if error is not None:
            warn_throttled(logger, "Cannot poll SQS, trying again: %s", error)

    def _receive(self, incarnation: str, count: int) -> list[Held]:
        hold, name = self._hold, self._line.name
        hold.queues.check(name)
        visibility = min(hold.address.visibility, FIRST_S)
        with hold.changed:
            self._line.polling = began = time.monotonic()
            hold.changed.notify_all()
        with hold.queues.telling("receive from", name, "sqs:ReceiveMessage"):
            answer = hold.polling_sqs.receive_message(
                QueueUrl=hold.queues.url(name),
                MaxNumberOfMessages=count,
                WaitTimeSeconds=WAIT_S if not self._line.failures else AGAIN_S,
                VisibilityTimeout=visibility,
                AttributeNames=["SentTimestamp", "MessageGroupId"],
            )
        until = _shown_at(began, visibility)
        place = (name, self._line.queue, self._line.rank)
        return [held_of(message, incarnation, place, until) for message in answer.get("Messages", ())]

    def _enter(self, incarnation: str, received: list[Held]) -> None:
        hold = self._hold
        with hold.changed:
            self._line.entering = True
        found = hold.known(received)
        try:
            returns = None if hold.closed else self._note(incarnation, found)
        except Exception:
            hold.forget(found)
            raise
        if returns is not None:
            hold.admit(found, returns)
            return
        hold.forget(found)
        shown = [{"ReceiptHandle": one.receipt, "VisibilityTimeout": 0} for one, known in found if not known]
        if shown:
            request(hold, self._line.name, Act.SHOW, shown)

    def _note(self, incarnation: str, found: list[tuple[Held, bool]]) -> Any:
        """Redeliveries of each; None if the lease is gone. Raises RedisError once their visibility is nearly over."""
        now = time.monotonic()
        until = now + PATIENCE * (min(one.until for one, _ in found) - now)
        while True:
            try:
                answer = run(self._hold.redis, calls.note(incarnation, self._line.name, found))
                return None if answer == calls.LOST else answer
            except (RedisError, OSError) as error:
                if time.monotonic() > until or self._hold.closed:
                    raise
                warn_throttled(logger, "The store is away, received messages wait for it: %s", error)
                time.sleep(RETRY_S)


def _shown_at(began: float, visibility: float) -> float:
    """When SQS shows again what it has just handed out: not before its answer came, less a long way."""
    return max(began, time.monotonic() - 1.0) + visibility
