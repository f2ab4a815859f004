"""The open streams: counted; ended when the gateway stops, or when the key that opened them lets nobody in any more.

    Needs: the key ─▶ scope ─▶ enter: its id and its secret's digest ─▶ every LOOK_S: all keys that have streams
                                                                  ─▶ their streams stop, and say why

So an answer that is under way ends within about a second after its key was revoked, disabled, or rotated away, or has
expired. One command asks the store for 500 keys, however many streams each has. While the store is away, streams go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.gateway.http.errors import Problem
from producers.store.access import api_keys
from producers.store.access.api_keys import Opened

logger = logging.getLogger(__name__)

#: Time (s) between two looks at the keys of open streams.
LOOK_S: Final = 0.75
#: Keys that one command asks for.
AT_ONCE: Final = 500
#: Name in a connection's state of the key that opened it; its secret is hashed where a stream is entered.
OPENED: Final = "opened"
#: A stream's end: None where the gateway stops or the client has left.
Stop = asyncio.Future[Problem | None]


class Streams:
    """The open streams of a gateway, and the keys that opened them."""

    def __init__(self) -> None:
        self._open: dict[Stop, Opened | None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def end(self) -> None:
        """End all streams; their clients may resume them at another gateway."""
        for stop in self._open:
            if not stop.done():
                stop.set_result(None)

    def enter(self, scope: MutableMapping[str, Any]) -> Stop:
        """`scope`: of the stream's connection."""
        stop: Stop = asyncio.get_running_loop().create_future()
        self._open[stop] = api_keys.opened(scope.get("state", {}).get(OPENED))
        return stop

    def leave(self, stop: Stop) -> None:
        self._open.pop(stop, None)

    def keys(self) -> set[str]:
        """The ids of keys that have open streams."""
        return {opened.id for opened in self._open.values() if opened is not None}

    def end_of(self, found: Mapping[str, api_keys.Key | None]) -> None:
        """End the streams of those of these keys that do not let their holder in now."""
        now = time.time()
        for stop, opened in self._open.items():
            if opened is not None and opened.id in found and not stop.done():
                key = found[opened.id]
                if key is None or not key.accepts(opened.digest, now):
                    stop.set_result(ended())

    async def watch(self, store: Redis) -> None:
        """End streams whose keys have ended, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            ids = sorted(self.keys())
            for start in range(0, len(ids), AT_ONCE):
                try:
                    self.end_of(await api_keys.several(store, ids[start : start + AT_ONCE]))
                except FAILURES as error:
                    warn_throttled(logger, "cannot look at the keys of open streams: %s", error)


def ended() -> Problem:
    return Problem(401, "This key does not work any more, so the answer ends here.", code="invalid_api_key")


def why_stopped(stop: Stop) -> Problem | None:
    """What to tell the client of a stream that stops; None where nothing of its own ended it."""
    return stop.result() if stop.done() else None
