"""Hears words to this worker on a channel of the store.

cancel TASK    a cancel should not wait for the task's next token
drain          take no more tasks, end the running ones, exit (`penstock rollout --drain-old`)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import text
from producers.contract import keys
from workers.connect import LOST, connect
from workers.flow.deliveries import Deliveries
from workers.flow.publisher import Publisher
from workers.state.incarnation import Incarnation

logger = logging.getLogger(__name__)

#: A quiet connection is asked for a sign of life this often (s), and made anew when none came by the next time.
PING_S = 5.0
RETRY_S = 0.5


class Control:
    """A thread for each life, on a connection of its own, from `listen` until the life is over."""

    def __init__(self, store: str, deliveries: Deliveries, publisher: Publisher) -> None:
        self._redis = connect(store)
        self._deliveries = deliveries
        self._publisher = publisher
        self.on_drain: Callable[[str], None] = lambda why: None
        """Called with the reason when the worker is told to drain."""
        self._stopping = False

    def listen(self, life: Incarnation) -> None:
        """Begin."""
        threading.Thread(target=self._listen, args=(life,), name="penstock-control", daemon=True).start()

    def stop(self) -> None:
        self._stopping = True

    def _listen(self, life: Incarnation) -> None:
        while not self._deaf(life):
            try:
                with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                    channel.subscribe(keys.control(life.id))
                    heard = asked = time.monotonic()
                    while not self._deaf(life):
                        message = channel.get_message(timeout=min(1.0, PING_S / 2))
                        now = time.monotonic()
                        if message and message["type"] == "message":
                            self._heard(text(message["data"]))
                        if message:
                            heard = now
                        elif now - heard > 2 * PING_S:
                            raise ConnectionError(f"no sign of life for {2 * PING_S:.0f} s")
                        elif now - max(heard, asked) > PING_S:
                            channel.ping()
                            asked = now
            except LOST as exc:
                warn_throttled(logger, "Lost the control channel, subscribing again: %s", exc)
                time.sleep(RETRY_S)

    def _deaf(self, life: Incarnation) -> bool:
        return life.over or self._stopping

    def _heard(self, message: str) -> None:
        word, _, task_id = message.partition(" ")
        if word == "drain":
            self.on_drain("told to drain")
        if word == "cancel":
            for delivery in list(self._deliveries.held.values()):
                if delivery.task_id == task_id:
                    delivery.cancelled = True
                    if delivery.uuid in self._deliveries.running:  # else whoever starts it sees to it
                        self._publisher.conclude_cancelled(delivery)
