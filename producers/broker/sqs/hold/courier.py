"""Takes steps of errands to the store and to SQS, and renews what stays: all writes for held messages, on one thread.

So a renewal never follows a hand-back. Steps of one kind share a request: the store's all, SQS's by ten. A delete waits
for others for a while; nothing else does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import RedisError

from producers.broker.sqs.hold.errand import Act, Ask, Errand
from producers.broker.sqs.hold.held import Held
from producers.broker.sqs.hold.requests import BATCH, GONE, request
from producers.broker.values import PutDown
from producers.connection.aws import AwsError, AwsMissing
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, run_many

if TYPE_CHECKING:
    from producers.broker.sqs.hold.hold import Hold

logger = logging.getLogger(__name__)

#: Longest wait (s) of a delete for others.
LINGER_S: Final = 0.5
LONGEST_PAUSE_S: Final = 5.0


class Courier(threading.Thread):
    def __init__(self, hold: Hold) -> None:
        super().__init__(name="penstock-sqs-courier", daemon=True)
        self._hold = hold
        self._changed = hold.changed
        self.errands: list[Errand] = []
        self._hurry = False

    def add(self, *errands: Errand) -> None:
        """Under the hold's lock. Their first steps are taken soon."""
        for errand in errands:
            errand.advance()
            if errand.answer is None:
                self.errands.append(errand)
        self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until all errands have ended, without lingering. Returns False if they have not in time."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self.errands, timeout)
            finally:
                self._hurry = False

    def run(self) -> None:
        while True:
            try:
                if not (ready := self._wait()):
                    return
                self._take(ready)
            except Exception:  # of one step, that nobody foresaw: the others' must not wait for it
                logger.exception("An errand to SQS failed, going on")
                time.sleep(LONGEST_PAUSE_S)

    def _wait(self) -> list[Errand]:
        """Waits for the errands that are due next. Returns none once the hold is closed and all is done."""
        with self._changed:
            while not (ready := self._ready(time.monotonic())):
                if self._hold.closed:
                    return []
                self._changed.wait(self._pause())
            return ready

    # ---- what is next ---------------------------------------------------------------------------------------------

    def _ready(self, now: float) -> list[Errand]:
        """Errands whose next step is due. Chores of the hold may add some."""
        self._hold.chores.tend(now)
        due = [one for one in self.errands if one.after <= now]
        company: dict[str, list[Errand]] = {}
        for one in due:
            if isinstance(one.step, Ask) and one.step.lingers and not self._hold.address.fifo:  # its group waits
                company.setdefault(one.step.list, []).append(one)
        hurried = self._hurry or self._hold.closed
        waiting = [
            one
            for some in company.values()
            if not hurried and len(some) < BATCH and some[0].at + LINGER_S > now
            for one in some
        ]
        return [one for one in due if one not in waiting]

    def _pause(self) -> float | None:
        now = time.monotonic()
        times = [one.after if one.after > now else one.at + LINGER_S for one in self.errands]
        times.append(self._hold.chores.next_at(now))
        soonest = min(times)
        return None if soonest == float("inf") else max(0.001, soonest - now)

    # ---- a round ----------------------------------------------------------------------------------------------------

    def _take(self, ready: Sequence[Errand]) -> None:
        calls = [one for one in ready if isinstance(one.step, Call)]
        if calls:
            self._store(calls)
        kinds: dict[tuple[str, Act], list[Errand]] = {}
        for one in ready:
            if isinstance(one.step, Ask):
                kinds.setdefault((one.step.list, one.step.act), []).append(one)
        for (name, act), some in kinds.items():
            for at in range(0, len(some), BATCH):
                self._sqs(name, act, some[at : at + BATCH])

    def _store(self, errands: Sequence[Errand]) -> None:
        try:
            answers = run_many(self._hold.redis, [one.step for one in errands if isinstance(one.step, Call)])
        except (RedisError, OSError) as error:
            warn_throttled(logger, "The store is away, messages on SQS are put down later: %s", error)
            self._later(errands)
            return
        for one, answer in zip(errands, answers, strict=True):
            if isinstance(answer, Exception):
                warn_throttled(logger, "A message's books cannot be changed, trying again: %s", answer)
                self._later([one])
            else:
                self._advance(one, answer)

    def _sqs(self, name: str, act: Act, errands: Sequence[Errand]) -> None:
        asked = [one for one in errands if not _needless(one.step)]
        for one in errands:
            if one not in asked:
                self._advance(one, False)
        try:
            refused = (
                request(self._hold, name, act, [one.step.entry for one in asked if isinstance(one.step, Ask)])
                if asked
                else {}
            )
        except (AwsError, RedisError, OSError) as error:
            if isinstance(error, AwsError) and error.trouble is None and not isinstance(error, AwsMissing):
                self._alone(name, act, asked, error)
                return
            warn_throttled(logger, "Messages on SQS are put down later: %s", error)
            self._later(asked)
            return
        for place, one in enumerate(asked):
            own = refused.get(place)
            if own is not None and own.trouble is not None:
                warn_throttled(logger, "A message on SQS is put down later: %s", own)
                self._later([one])
            elif own is not None and act is Act.SEND:
                self._refused(one, own)
            else:
                self._advance(one, own is not None and own.code in GONE)

    def _alone(self, name: str, act: Act, errands: Sequence[Errand], error: AwsError) -> None:
        """SQS refused a request for one of its messages: find out for which, and go on without it."""
        if len(errands) > 1:
            for one in errands:
                self._sqs(name, act, [one])
        elif act is Act.SEND:
            self._refused(errands[0], error)
        else:
            self._advance(errands[0], True)

    def _refused(self, errand: Errand, error: AwsError) -> None:
        """SQS does not take what is to be sent, so nothing may be deleted for it: whoever sees it next tries again."""
        warn_throttled(logger, "A message cannot be sent, it comes back when its visibility is over: %s", error)
        with self._changed:
            errand.steps.close()
            errand.answer = PutDown.GONE
            self._over(errand)

    def _advance(self, errand: Errand, answer: Any) -> None:
        with self._changed:
            try:
                errand.advance(answer)
            except Exception:
                logger.exception("A message on SQS cannot be put down: it comes back when its visibility is over")
                errand.answer = PutDown.GONE
            self._over(errand)

    def _over(self, errand: Errand) -> None:
        if errand.answer is not None:
            self.errands.remove(errand)
            self._hold.ended(errand)
        self._changed.notify_all()

    def _later(self, errands: Sequence[Errand]) -> None:
        with self._changed:
            for one in errands:
                one.failures += 1
                one.after = time.monotonic() + min(LONGEST_PAUSE_S, 0.1 * 2**one.failures)


def _needless(step: Call | Ask | None) -> bool:
    """SQS has no message for it any more; or it renews what is on its way back by now."""
    if not isinstance(step, Ask) or step.receipt_of is None:
        return False
    return not step.receipt_of.receipt or (
        isinstance(step.receipt_of, Held) and step.renews and step.receipt_of.leaving
    )
