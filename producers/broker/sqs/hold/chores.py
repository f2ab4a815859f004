"""The courier's work beside deliveries that are put down: renewals, due messages, what dead workers left."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from producers.broker.sqs.hold import calls, errand
from producers.broker.sqs.hold.errand import ANEW_BEFORE_S, Errand, Steps
from producers.broker.sqs.hold.held import LONGEST_S, Held
from producers.broker.sqs.hold.reaping import Flying
from producers.broker.values import PutDown

if TYPE_CHECKING:
    from producers.broker.sqs.hold.hold import Hold

#: A message that no thread takes goes back after so long (s).
KEEP_S: Final = 2.0
#: Interval (s) of looking for kept messages that are due, and how many are sent at a time.
DUE_S: Final = 1.0
DUE: Final = 10


class Chores:
    """Its methods are called under the hold's lock, except `reap`."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._half = hold.address.visibility / 2
        self._due_at = 0.0
        self._sending: set[bytes] = set()
        self._reaping: set[tuple[str, str]] = set()

    def tend(self, now: float) -> None:
        """Give back what nobody takes, renew what stays, look for what is due."""
        hold = self._hold
        for one in hold.buffered():
            if one.received + KEEP_S <= now and not one.leaving:
                hold.untaken(one)
        for one in self._renewable():
            if one.given and not hold.address.fifo and now > one.received + LONGEST_S - ANEW_BEFORE_S:
                one.renewing = True
                hold.courier.add(Errand(errand.anew(one)))
            elif now >= self._renew_at(one):
                one.renewing = True
                hold.courier.add(Errand(errand.renew(one, hold.address.visibility)))
        if hold.serves(now) and now >= self._due_at:
            self._due_at = now + DUE_S
            hold.courier.add(Errand(self._look_for_due()))

    def next_at(self, now: float) -> float:
        """When `tend` has something to do (monotonic)."""
        times = [one.received + KEEP_S for one in self._hold.buffered()]
        times += [self._renew_at(one) for one in self._renewable()]
        if self._hold.serves(now):
            times.append(self._due_at)
        return min(times, default=inf)

    def _renew_at(self, one: Held) -> float:
        """At half of its visibility, which is shorter at first."""
        return one.until - min(self._half, (one.until - one.received) / 2)

    def _renewable(self) -> list[Held]:
        return [one for one in self._hold.held if one.receipt and not (one.leaving or one.lost or one.renewing)]

    # ---- messages that the store keeps, for their delay is too long for SQS -----------------------------------------

    def _look_for_due(self) -> Steps:
        for queue in self._hold.served:
            entries = yield calls.due(queue, DUE)
            fresh = [entry for entry in entries if entry not in self._sending]
            self._sending.update(fresh)
            self._hold.courier.add(*(Errand(self._resend(queue, entry)) for entry in fresh))
        return PutDown.DONE

    def _resend(self, queue: str, entry: bytes) -> Steps:
        try:
            return (yield from errand.resend(queue, entry))
        finally:
            self._sending.discard(entry)

    # ---- dead workers -----------------------------------------------------------------------------------------------

    def reap(self, incarnation: str, flying: Sequence[Flying], timeout: float) -> None:
        """Tell SQS of what REAP has put on its way; wait for it for so long (s), it goes on then."""
        if not flying:
            return
        with self._hold.changed:
            fresh = [one for one in flying if (incarnation, one.field) not in self._reaping]
            errands = [Errand(self._reap(incarnation, one)) for one in fresh]
            self._reaping.update((incarnation, one.field) for one in fresh)
            self._hold.courier.add(*errands)
            self._hold.changed.wait_for(lambda: all(one.answer for one in errands), timeout)

    def _reap(self, incarnation: str, one: Flying) -> Steps:
        try:
            return (yield from errand.reap(incarnation, one))
        finally:
            self._reaping.discard((incarnation, one.field))
