"""Takes ACK and BACK to the broker, on a thread and a connection of its own, again and again until they are answered.

Both name the delivery's UUID, so that saying one twice does nothing; what belongs to an incarnation that is over is
dropped, because its deliveries went back by REAP.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from producers.broker import redis as broker
from producers.connection.log_throttle import complain
from producers.connection.script import Call, run_many
from producers.store.protocol import release
from workers.leases.incarnation import Incarnation
from workers.runtime.connect import LOST, connect

logger = logging.getLogger(__name__)

BATCH = 256
RETRY_S = 0.2


@dataclass(slots=True)
class _Errand:
    incarnation: Incarnation
    call: Call
    instead: Callable[[], Sequence[Call]] = tuple
    """What to say where the broker holds the task's record, and it is not settled: a failover lost that."""


class Courier(threading.Thread):
    def __init__(self, url: str, queue: str) -> None:
        super().__init__(name="penstock-courier", daemon=True)
        self.redis = connect(url)
        self._queue = queue
        self._errands: deque[_Errand] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    def ack(self, incarnation: Incarnation, uuid: str, reason: str = "", used: int = 0, settled: str = "") -> None:
        """It is done with, for `used` KV tokens; with a reason, its message goes to the dead-letter list.

        `settled`: its task, if that is; where it turns out not to be, the message goes back, for whoever is next.
        """
        errand = _Errand(incarnation, broker.ack(incarnation.id, uuid, reason, used, settled))
        if settled:
            errand.instead = lambda: (release(settled, uuid), broker.back(incarnation.id, self._queue, uuid))
        self._add(errand)

    def back(self, incarnation: Incarnation, uuid: str, delay: float = 0.0) -> None:
        """The message goes back to the front of its list, after `delay` seconds."""
        self._add(_Errand(incarnation, broker.back(incarnation.id, self._queue, uuid, int(delay * 1000))))

    @property
    def pending(self) -> list[str]:
        """The deliveries of which something is to be said, or is being said."""
        with self._changed:
            return [str(errand.call.args[0]) for errand in self._errands]

    def flush(self, timeout: float) -> bool:
        """Wait until everything was taken; False when the broker did not answer in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._errands, timeout)

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _add(self, errand: _Errand) -> None:
        with self._changed:
            self._errands.append(errand)
            self._changed.notify_all()

    def run(self) -> None:
        with suppress(*LOST):  # so that handing back, which has little time, does not begin with that
            self.redis.script_load(broker.back("", "", "").script.text)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._errands or self._stopping)
                if self._stopping and not self._errands:
                    return
                batch = [self._errands[i] for i in range(min(BATCH, len(self._errands)))]
            done = self._take(batch)
            with self._changed:
                for _ in batch:
                    self._errands.popleft()
                self._errands.extendleft(reversed([errand for errand in batch if id(errand) not in done]))
                self._changed.notify_all()
                if len(done) < len(batch):
                    if self._stopping:
                        return
                    self._changed.wait(RETRY_S)

    def _take(self, batch: list[_Errand]) -> set[int]:
        """The ids of the errands that need no second try."""
        live = [errand for errand in batch if not errand.incarnation.over]
        done = {id(errand) for errand in batch if errand.incarnation.over}
        try:
            answers = run_many(self.redis, [errand.call for errand in live])
            unsettled = [errand for errand, answer in zip(live, answers, strict=True) if answer == -1]
            run_many(self.redis, [call for errand in unsettled for call in errand.instead()])
        except LOST as exc:
            complain(logger, "The broker did not take %d answers, trying again: %s", len(live), exc)
            return done
        if unsettled:
            logger.warning("A failover lost the end of %d tasks: they go back to the queue", len(unsettled))
        for errand, answer in zip(live, answers, strict=True):
            if isinstance(answer, Exception):
                complain(logger, "The broker refused an answer, trying again: %s", answer)
            else:
                done.add(id(errand))
        return done
