"""Says when something was put into our lists, without polling and without taking it.

The server tells a tracking client of every key that changes under a prefix (`CLIENT TRACKING ... BCAST`, Redis 6 and
Valkey), whoever changes it: a plain Celery sender's LPUSH too. What arrives is not even parsed: any byte means "look".
A blocking pop would wake as fast, but a worker that dies between the pop and the next command takes the message along.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from workers.connect import LOST, connect

logger = logging.getLogger(__name__)

RECONNECT_S = 0.5
#: How often to look where the server has no tracking (Redis before 6) or forbids it.
POLL_S = 0.05


def shortest_prefixes(queues: Sequence[str]) -> list[str]:
    """Tracked prefixes must not overlap."""
    found: list[str] = []
    for queue in sorted(queues):
        if not any(queue.startswith(prefix) for prefix in found):
            found.append(queue)
    return found


class Waker(threading.Thread):
    """Calls `poke` from its thread whenever a list of the queues may have changed."""

    def __init__(self, url: str, queues: Sequence[str], poke: Callable[[], None]) -> None:
        super().__init__(name="penstock-waker", daemon=True)
        # No socket timeout: silence is what an idle queue sounds like. Keepalive finds a dead peer.
        self._redis = connect(url, protocol=3, socket_timeout=None)
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
                logger.warning("The broker offers no key tracking (%s): looking every %s s instead", exc, POLL_S)
                while not self._stopped.wait(POLL_S):
                    self._poke()
            except (*LOST, ValueError, AttributeError) as exc:
                # AttributeError, ValueError: stop() closed the connection under our hands
                if not self._stopped.wait(RECONNECT_S):
                    logger.warning("Lost the broker's wake-up connection, connecting again: %s", exc)

    def _follow(self) -> None:
        connection: Any = self._redis.connection_pool.make_connection()
        self._connection = connection
        try:
            connection.connect()
            words = [word for prefix in self._prefixes for word in ("PREFIX", prefix)]
            connection.send_command("CLIENT", "TRACKING", "ON", "BCAST", *words)
            connection.read_response()
            self._poke()  # what came before we listened
            sock = connection._sock
            while not self._stopped.is_set():
                if not sock.recv(65536):
                    raise ConnectionError("the server closed it")
                self._poke()
        finally:
            self._connection = None
            connection.disconnect()
