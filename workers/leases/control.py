"""Listens, on connections of its own, for as long as this process lives.

On the store, words to this worker come on a channel:

cancel TASK    a cancel should not wait for the task's next token
drain          take no more tasks, end the running ones, exit (`penstock rollout --drain-old`)

On store and broker, it listens to the incarnation's alive channel, where nothing is ever said: that somebody listens
tells others that this process is there (docs/how/failover.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from redis import Redis
from redis.client import PubSub

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
    """A thread for each life and server, from `listen` until the life is over. `servers`: URLs, the store's first."""

    def __init__(self, servers: Sequence[str], deliveries: Deliveries, publisher: Publisher) -> None:
        self._servers = [connect(url) for url in servers]
        self._deliveries = deliveries
        self._publisher = publisher
        self.on_drain: Callable[[str], None] = lambda why: None
        """Called with the reason when the worker is told to drain."""
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when a server begins to hear this worker or hears it no more."""
        self._life: Incarnation | None = None
        self._since: dict[tuple[str, Redis], float] = {}
        self._stopping = False

    def listen(self, life: Incarnation) -> None:
        """Begin, once for each life."""
        if life is self._life:
            return
        self._life = life
        for server in self._servers:
            names = [keys.alive(life.id), *([keys.control(life.id)] if server is self._servers[0] else [])]
            threading.Thread(
                target=self._listen, args=(life, server, names), name="penstock-control", daemon=True
            ).start()

    def heard_since(self, life: Incarnation) -> tuple[float, ...]:
        """Since when (monotonic) each server has heard this life without a break, the store first; empty where one does
        not hear it. Other times are other subscriptions."""
        since = [self._since.get((life.id, server)) for server in self._servers]
        return tuple(at for at in since if at is not None) if None not in since else ()

    def stop(self) -> None:
        self._stopping = True

    def _listen(self, life: Incarnation, server: Redis, names: Sequence[str]) -> None:
        while not self._deaf(life):
            try:
                with server.pubsub() as channel:
                    channel.subscribe(*names)
                    self._hear(channel, life, server, len(names))
            except LOST as exc:
                self._since.pop((life.id, server), None)
                self.on_change()
                warn_throttled(logger, "Lost the control channel, subscribing again: %s", exc)
                time.sleep(RETRY_S)
        self._since.pop((life.id, server), None)

    def _hear(self, channel: PubSub, life: Incarnation, server: Redis, subscriptions: int) -> None:
        """Until this life is over. Raises ConnectionError where the server is silent."""
        heard = asked = time.monotonic()
        while not self._deaf(life):
            message = channel.get_message(timeout=min(1.0, PING_S / 2))
            now = time.monotonic()
            if message and message["type"] == "message":
                self._heard(text(message["data"]))
            elif message and message["type"] == "subscribe" and message["data"] == subscriptions:
                self._since[life.id, server] = now
                self.on_change()
            if message:
                heard = now
            elif now - heard > 2 * PING_S:
                raise ConnectionError(f"no sign of life for {2 * PING_S:.0f} s")
            elif now - max(heard, asked) > PING_S:
                channel.ping()
                asked = now

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
