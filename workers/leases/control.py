"""Subscribes to this worker's channels, on connections of its own, for as long as the process lives.

On the store, a channel carries commands to this worker:

cancel TASK    a cancel should not wait for the task's next token
drain          take no more tasks, end the running ones, exit (`penstock rollout --drain-old`)

On store and broker it subscribes to the incarnation's alive channel, on which nothing is ever published: the
subscription itself shows others that this process is there (docs/how/failover.md).
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
from workers.state.delivery import Incarnation

logger = logging.getLogger(__name__)

#: A quiet connection is pinged this often (s), and replaced if no answer has come by the next time.
PING_S = 5.0
RETRY_S = 0.5


class Control:
    """A thread for each life and server, from `listen` until the life is over. `servers`: URLs, the store's first."""

    def __init__(self, servers: Sequence[str], deliveries: Deliveries, publisher: Publisher) -> None:
        self._servers = [connect(url) for url in servers]
        self._deliveries = deliveries
        self._publisher = publisher
        self.on_drain: Callable[[str], None] = lambda why: None
        """Called with the reason when a command to drain comes."""
        self.on_change: Callable[[], None] = lambda: None
        """Called, on any thread, when a subscription begins or ends."""
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

    def subscribed_since(self, life: Incarnation) -> tuple[float, ...]:
        """Returns the times (monotonic) at which the present subscriptions began, the store's first; empty if one is
        missing. Other times are other subscriptions."""
        since = [self._since.get((life.id, server)) for server in self._servers]
        return tuple(at for at in since if at is not None) if None not in since else ()

    def stop(self) -> None:
        self._stopping = True

    def _listen(self, life: Incarnation, server: Redis, names: Sequence[str]) -> None:
        while not self._ended(life):
            try:
                with server.pubsub() as channel:
                    channel.subscribe(*names)
                    self._receive(channel, life, server, len(names))
            except LOST as exc:
                self._since.pop((life.id, server), None)
                self.on_change()
                warn_throttled(logger, "Lost the control channel, subscribing again: %s", exc)
                time.sleep(RETRY_S)
        self._since.pop((life.id, server), None)

    def _receive(self, channel: PubSub, life: Incarnation, server: Redis, subscriptions: int) -> None:
        """Handles messages until this life is over. Raises ConnectionError if the server is silent."""
        received_at = pinged_at = time.monotonic()
        while not self._ended(life):
            message = channel.get_message(timeout=min(1.0, PING_S / 2))
            now = time.monotonic()
            if message and message["type"] == "message":
                self._handle(text(message["data"]))
            elif message and message["type"] == "subscribe" and message["data"] == subscriptions:
                self._since[life.id, server] = now
                self.on_change()
            if message:
                received_at = now
            elif now - received_at > 2 * PING_S:
                raise ConnectionError(f"no sign of life for {2 * PING_S:.0f} s")
            elif now - max(received_at, pinged_at) > PING_S:
                channel.ping()
                pinged_at = now

    def _ended(self, life: Incarnation) -> bool:
        return life.over or self._stopping

    def _handle(self, message: str) -> None:
        command, _, task_id = message.partition(" ")
        if command == "drain":
            self.on_drain("told to drain")
        if command == "cancel":
            for delivery in list(self._deliveries.by_uuid.values()):
                if delivery.task_id == task_id:
                    delivery.cancelled = True
                    if delivery.uuid in self._deliveries.running:  # else whoever starts it sees to it
                        self._publisher.conclude_cancelled(delivery)
