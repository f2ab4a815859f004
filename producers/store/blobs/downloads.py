"""Reads objects of S3 in order by one request: an answer stays open, and the next read goes on where it stands.

Who reads from somewhere else gets an answer of its own. Few stay open: the longest unused is closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from producers.connection.aws import AwsError

#: Reads of fewer bytes (a block of a result) are requests of their own.
LEAST: Final = 1 << 18
#: Most open answers, and the time (s) for which one that nobody reads stays open.
MOST: Final = 16
IDLE_S: Final = 30.0


class Answer(Protocol):
    """An object's bytes, as they come."""

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end. Raises AwsError."""

    def close(self) -> None: ...


class Downloads:
    """Threads may share it. `ask(what, start, end)`: opens an answer with an object's bytes from `start` to `end`
    (exclusive), or to the object's end if that is None. `what`: its name, and whatever else `ask` needs."""

    def __init__(self, ask: Callable[[Any, int, int | None], Answer]) -> None:
        self._ask = ask
        self._open: dict[tuple[tuple[str, Any], int], tuple[Answer, float]] = {}
        self._lock = threading.Lock()

    def read(self, what: tuple[str, Any], start: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the object. Raises as `ask`."""
        answer = self._taken(what, start)
        if answer is not None:
            with suppress(AwsError):  # the connection was lost: ask anew
                return self._read(what, answer, start, size)
        return self._read(what, self._ask(what, start, None if size >= LEAST else start + size), start, size)

    def forget(self, name: str) -> None:
        """The object is gone, or another one."""
        with self._lock:
            gone = [self._open.pop(place)[0] for place in list(self._open) if place[0][0] == name]
        for answer in gone:
            answer.close()

    def _read(self, what: tuple[str, Any], answer: Answer, start: int, size: int) -> bytes:
        try:
            data = answer.read(size)
        except BaseException:
            answer.close()
            raise
        if len(data) < size or size < LEAST:
            answer.close()
        else:
            self._keep(what, start + size, answer)
        return data

    def _taken(self, what: tuple[str, Any], start: int) -> Answer | None:
        with self._lock:
            return self._open.pop((what, start), (None, 0.0))[0]

    def _keep(self, what: tuple[str, Any], start: int, answer: Answer) -> None:
        now = time.monotonic()
        with self._lock:
            closing = [self._open.pop((what, start), (None, 0.0))[0]]
            self._open[what, start] = answer, now
            for place, (_, used) in list(self._open.items()):
                if used < now - IDLE_S or len(self._open) > MOST:
                    closing.append(self._open.pop(place)[0])
        for old in closing:
            if old is not None:
                old.close()
