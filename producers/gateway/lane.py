"""A few threads for one model's work, apart from everybody else's."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LaneClosed(Exception):
    """It takes no more work."""


class Lane:
    """Runs work in turn on daemon threads: work that never ends must not keep the process from ending.

    `waiting`: how much is queued or runs, work that its caller gave up included.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._work: set[Future[Any]] = set()
        self._threads = threads
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        return len(self._work)

    async def run(self, work: Callable[[], T], seconds: float | None = None) -> T:
        """What `work` returns or raises. Raises TimeoutError after so long, though what runs runs on; LaneClosed."""
        if self._closed:
            raise LaneClosed
        future: Future[T] = Future()
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        self._queue.put((future, work))
        async with asyncio.timeout(seconds):
            # Shielded: whoever stops to wait does not make room for more while the thread is not free.
            return await asyncio.shield(asyncio.wrap_future(future))

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """End the threads once all that was asked for before is done, and then `last`. Does not wait."""
        self._closed = True
        if last is not None:
            self._queue.put((Future(), last))
        for _ in range(self._threads):
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            try:
                answer = work()
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                future.set_exception(error)
            else:
                future.set_result(answer)
