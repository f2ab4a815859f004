"""Sends ACK and BACK to the broker, on a thread and a connection of its own, until the broker has taken them.

Both name the delivery's UUID, so a repeated one does nothing. Requests of an incarnation that is over are dropped,
because REAP returned its deliveries.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from producers.broker.base import Consumer
from producers.broker.values import Ack, Back, PutDown
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run_many
from producers.store.protocol import release
from workers.connect import LOST, connect
from workers.state.delivery import Incarnation

logger = logging.getLogger(__name__)

BATCH = 256
RETRY_S = 0.2


@dataclass(slots=True, eq=False)
class _Request:
    life: Incarnation
    answer: Ack | Back


class Acker(threading.Thread):
    """`store`: the URL of the store, where a task that turns out not to be settled is released."""

    def __init__(self, broker: Consumer, store: str) -> None:
        super().__init__(name="penstock-acker", daemon=True)
        self.broker = broker
        self._store = connect(store)
        self._requests: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    def ack(self, life: Incarnation, uuid: str, reason: str = "", used: int = 0, settled: str = "") -> None:
        """Acknowledges a delivery that used `used` KV tokens; with a reason, its message goes to the dead-letter list.

        `settled`: the id of its task, if that is settled. If the store has lost that, the message goes back.
        """
        self._add(_Request(life, Ack(life.id, uuid, reason, used, settled)))

    def back(self, life: Incarnation, uuid: str, delay: float = 0.0, to: str = "") -> None:
        """The message goes back to the front of its list, after `delay` seconds; or of its tier's in the queue `to`."""
        self._add(_Request(life, Back(life.id, uuid, delay, to)))

    @property
    def pending(self) -> list[str]:
        """UUIDs of deliveries whose ACK or BACK the broker has not taken yet."""
        with self._changed:
            return [request.answer.uuid for request in self._requests]

    def flush(self, seconds: float) -> bool:
        """Waits until the broker has taken all requests. False if it did not answer in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._requests, seconds)

    def stop(self, seconds: float) -> bool:
        """`flush`, and end."""
        flushed = self.flush(seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return flushed

    def _add(self, request: _Request) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def run(self) -> None:
        with suppress(*LOST):  # so that handing back, which has little time, does not begin with that
            self.broker.prepare()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._stopping)
                if self._stopping and not self._requests:
                    return
                batch = [self._requests[i] for i in range(min(BATCH, len(self._requests)))]
            done = self._take(batch)
            with self._changed:
                for _ in batch:
                    self._requests.popleft()
                self._requests.extendleft(reversed([request for request in batch if id(request) not in done]))
                self._changed.notify_all()
                if len(done) < len(batch):
                    if self._stopping:
                        return
                    self._changed.wait(RETRY_S)

    def _take(self, batch: list[_Request]) -> set[int]:
        """Sends the requests. Returns the ids of those that need no second try."""
        live = [request for request in batch if not request.life.over]
        done = {id(request) for request in batch if request.life.over}
        try:
            answers = self.broker.put_down([request.answer for request in live])
            unsettled = [r.answer for r, answer in zip(live, answers, strict=True) if answer is PutDown.UNSETTLED]
            self._return([ack for ack in unsettled if isinstance(ack, Ack)])
        except LOST as exc:
            warn_throttled(logger, "The broker did not take %d answers, trying again: %s", len(live), exc)
            return done
        for request, answer in zip(live, answers, strict=True):
            if isinstance(answer, Exception):
                warn_throttled(logger, "The broker refused an answer, trying again: %s", answer)
            else:
                done.add(id(request))
        return done

    def _return(self, unsettled: Sequence[Ack]) -> None:
        """Sends RELEASE and BACK for tasks of which the store has lost that they are settled."""
        if unsettled:
            run_many(self._store, [release(ack.settled, ack.uuid) for ack in unsettled])
            self.broker.put_down([Back(ack.incarnation, ack.uuid) for ack in unsettled])
            logger.warning("A failover lost the end of %d tasks: they go back to the queue", len(unsettled))
