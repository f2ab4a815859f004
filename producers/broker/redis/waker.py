"""Reports when a message was put into a worker's lists, without polling and without taking it.

The server tells a tracking client of every key that changes under a prefix (`CLIENT TRACKING ... BCAST`, Redis 6 and
Valkey), whoever changes it: a plain Celery sender's LPUSH too. What arrives is not even parsed: any byte means "look".
A blocking pop would wake as fast, but a worker that dies between the pop and the next command takes the message along.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import RedisError, ResponseError

from producers.connection.connect import connection_pool
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import Trouble, trouble

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
#: Interval (s) of pings on a quiet connection. It is reconnected if no answer came by the next ping.
PING_S = 5.0
PONG = b"+PONG\r\n"
#: Interval (s) of polling a server that has no tracking (Redis before 6) or forbids it.
POLL_S = 0.05


def shortest_prefixes(queues: Sequence[str]) -> list[str]:
    """Tracked prefixes must not overlap."""
    found: list[str] = []
    for queue in sorted(queues):
        if not any(queue.startswith(prefix) for prefix in found):
            found.append(queue)
    return found


class TrackingWaker(threading.Thread):
    """Calls `poke` from its thread whenever a list of the queues may have changed."""

    def __init__(self, url: str, queues: Sequence[str], poke: Callable[[], None]) -> None:
        super().__init__(name="penstock-waker", daemon=True)
        self._pool = connection_pool(url, timeout=PING_S, protocol=3)
        self._prefixes = shortest_prefixes(queues)
        self._poke = poke
        self._connection: Any = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        connection = self._connection
        if connection is not None:
            connection.disconnect()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            except ResponseError as exc:
                if trouble(exc) is Trouble.AWAY:
                    warn_throttled(logger, "The broker takes no wake-up connection, trying again: %s", exc)
                    self._stopped.wait(RECONNECT_S)
                    continue
                logger.warning("The broker offers no key tracking (%s): looking every %s s instead", exc, POLL_S)
                while not self._stopped.wait(POLL_S):
                    self._poke()
            except (RedisError, OSError, ValueError, AttributeError) as exc:
                # AttributeError, ValueError: stop() closed the connection under our hands
                if not self._stopped.wait(RECONNECT_S):
                    warn_throttled(logger, "Lost the broker's wake-up connection, connecting again: %s", exc)

    def _follow(self) -> None:
        connection: Any = self._pool.connection_class(**self._pool.connection_kwargs)
        self._connection = connection
        try:
            connection.connect()
            words = [word for prefix in self._prefixes for word in ("PREFIX", prefix)]
            connection.send_command("CLIENT", "TRACKING", "ON", "BCAST", *words)
            connection.read_response()
            self._poke()  # what came before we listened
            sock = connection._sock
            asked = False
            while not self._stopped.is_set():
                try:
                    heard = sock.recv(65536)
                except TimeoutError:
                    # Silence is what an idle queue sounds like, and a peer that vanished.
                    if asked:
                        raise
                    connection.send_command("PING", check_health=False)
                    asked = True
                    continue
                if not heard:
                    raise ConnectionError("the server closed it")
                if not asked or heard != PONG:
                    self._poke()
                asked = False
        finally:
            self._connection = None
            connection.disconnect()
