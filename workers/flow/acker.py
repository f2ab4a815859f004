"""Takes ACK and BACK to the broker, on a thread and a connection of its own, again and again until they are answered.

Both name the delivery's UUID, so that saying one twice does nothing; what belongs to an incarnation that is over is
dropped, because its deliveries went back by REAP.
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
from workers.state.incarnation import Incarnation

logger = logging.getLogger(__name__)

BATCH = 256
RETRY_S = 0.2


@dataclass(slots=True, eq=False)
class _Errand:
    life: Incarnation
    what: Ack | Back


class Acker(threading.Thread):
    """`store`: the URL of the store, which hears of it where a settled task turns out not to be."""

    def __init__(self, broker: Consumer, store: str) -> None:
        super().__init__(name="penstock-acker", daemon=True)
        self.broker = broker
        self._store = connect(store)
        self._errands: deque[_Errand] = deque()
        self._changed = threading.Condition()
        self._stopping = False

    def ack(self, life: Incarnation, uuid: str, reason: str = "", used: int = 0, settled: str = "") -> None:
        """It is done with, for `used` KV tokens; with a reason, its message goes to the dead-letter list.

        `settled`: its task, if that is; where it turns out not to be, the message goes back, for whoever is next.
        """
        self._add(_Errand(life, Ack(life.id, uuid, reason, used, settled)))

    def back(self, life: Incarnation, uuid: str, delay: float = 0.0, to: str = "") -> None:
        """The message goes back to the front of its list, after `delay` seconds; or of its tier's in the queue `to`."""
        self._add(_Errand(life, Back(life.id, uuid, delay, to)))

    @property
    def pending(self) -> list[str]:
        """The deliveries of which something is to be said, or is being said."""
        with self._changed:
            return [errand.what.uuid for errand in self._errands]

    def flush(self, seconds: float) -> bool:
        """Wait until everything was taken; False when the broker did not answer in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._errands, seconds)

    def stop(self, seconds: float) -> bool:
        """`flush`, and end."""
        flushed = self.flush(seconds)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return flushed

    def _add(self, errand: _Errand) -> None:
        with self._changed:
            self._errands.append(errand)
            self._changed.notify_all()

    def run(self) -> None:
        with suppress(*LOST):  # so that handing back, which has little time, does not begin with that
            self.broker.prepare()
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
        live = [errand for errand in batch if not errand.life.over]
        done = {id(errand) for errand in batch if errand.life.over}
        try:
            answers = self.broker.put_down([errand.what for errand in live])
            unsettled = [e.what for e, answer in zip(live, answers, strict=True) if answer is PutDown.UNSETTLED]
            self._return([what for what in unsettled if isinstance(what, Ack)])
        except LOST as exc:
            warn_throttled(logger, "The broker did not take %d answers, trying again: %s", len(live), exc)
            return done
        for errand, answer in zip(live, answers, strict=True):
            if isinstance(answer, Exception):
                warn_throttled(logger, "The broker refused an answer, trying again: %s", answer)
            else:
                done.add(id(errand))
        return done

    def _return(self, unsettled: Sequence[Ack]) -> None:
        """The store has lost that these tasks are settled: RELEASE and BACK."""
        if unsettled:
            run_many(self._store, [release(one.settled, one.uuid) for one in unsettled])
            self.broker.put_down([Back(one.incarnation, one.uuid) for one in unsettled])
            logger.warning("A failover lost the end of %d tasks: they go back to the queue", len(unsettled))
