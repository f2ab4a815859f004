"""The sender's work beside deliveries that are put down: renewals, due messages, what dead workers left."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import inf
from typing import Final, Protocol

from producers.broker.sqs.address import Address
from producers.broker.sqs.receiver import flight, send
from producers.broker.sqs.receiver.flight import LONGEST_S, InFlight, ReceivedMessage
from producers.broker.sqs.receiver.send import ANEW_BEFORE_S, Request, Sender, Steps
from producers.broker.values import PutDown

#: A message that no thread takes goes back after so long (s).
KEEP_S: Final = 2.0
#: Interval (s) of looking for kept messages that are due, and how many are sent at a time.
DUE_S: Final = 1.0
DUE: Final = 10


class Owner(Protocol):
    """The receiver, as its maintenance needs it. The methods are called under its lock, `changed`."""

    address: Address
    changed: threading.Condition
    served: list[str]
    sender: Sender

    @property
    def messages(self) -> list[ReceivedMessage]: ...

    def buffered(self) -> list[ReceivedMessage]: ...

    def give_back_unfit(self, message: ReceivedMessage) -> None: ...

    def serves(self, now: float) -> bool: ...


class Maintenance:
    """Its methods are called under the owner's lock, except `reap`."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._half = owner.address.visibility / 2
        self._due_at = 0.0
        self._sending: set[bytes] = set()
        self._reaping: set[tuple[str, str]] = set()

    def tend(self, now: float) -> None:
        """Give back what nobody takes, renew what stays, look for what is due."""
        owner = self._owner
        for message in owner.buffered():
            if message.received + KEEP_S <= now and not message.leaving:
                owner.give_back_unfit(message)
        for message in self._renewable():
            ending = now > message.received + LONGEST_S - ANEW_BEFORE_S
            if message.delivered and not owner.address.fifo and ending:
                message.renewing = True
                owner.sender.add(Request(send.anew(message)))
            elif now >= self._renew_at(message):
                message.renewing = True
                owner.sender.add(Request(send.renew(message, owner.address.visibility)))
        if owner.serves(now) and now >= self._due_at:
            self._due_at = now + DUE_S
            owner.sender.add(Request(self._look_for_due()))

    def next_at(self, now: float) -> float:
        """When `tend` has something to do (monotonic)."""
        times = [message.received + KEEP_S for message in self._owner.buffered()]
        times += [self._renew_at(message) for message in self._renewable()]
        if self._owner.serves(now):
            times.append(self._due_at)
        return min(times, default=inf)

    def _renew_at(self, message: ReceivedMessage) -> float:
        """At half of its visibility, which is shorter at first."""
        return message.until - min(self._half, (message.until - message.received) / 2)

    def _renewable(self) -> list[ReceivedMessage]:
        return [m for m in self._owner.messages if m.receipt and not (m.leaving or m.lost or m.renewing)]

    # ---- messages that the store keeps, for their delay is too long for SQS -----------------------------------------

    def _look_for_due(self) -> Steps:
        for queue in self._owner.served:
            entries = yield flight.due(queue, DUE)
            fresh = [entry for entry in entries if entry not in self._sending]
            self._sending.update(fresh)
            self._owner.sender.add(*(Request(self._resend(queue, entry)) for entry in fresh))
        return PutDown.DONE

    def _resend(self, queue: str, entry: bytes) -> Steps:
        try:
            return (yield from send.resend(queue, entry))
        finally:
            self._sending.discard(entry)

    # ---- dead workers -----------------------------------------------------------------------------------------------

    def reap(self, incarnation: str, entries: Sequence[InFlight], timeout: float) -> None:
        """Tell SQS of what REAP has put on its way; wait for it for so long (s), it goes on then."""
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
            return (yield from send.reap(incarnation, entry))
        finally:
            self._reaping.discard((incarnation, entry.field))
