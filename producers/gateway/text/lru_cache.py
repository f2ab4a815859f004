"""What was loaded is kept: loaded once for all who ask at the same time, the least recently used dropped first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Kept(Generic[K, V]):
    """At most `most` values. `dropped` is told of each that goes. All calls from one event loop."""

    def __init__(self, most: int, dropped: Callable[[V], None] | None = None) -> None:
        self._most = most
        self._dropped = dropped
        # A load is a task that all who want it await, so that it happens once.
        self._loads: OrderedDict[K, asyncio.Task[V]] = OrderedDict()

    async def get(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The value of a key. Raises what its loading raises; that is tried anew by the next who asks."""
        task = self._loads.get(key)
        if task is None:
            task = self._loads[key] = asyncio.create_task(load())
            task.add_done_callback(lambda done: self._forget_failed(key, done))
        self._loads.move_to_end(key)
        while len(self._loads) > self._most:
            _, oldest = self._loads.popitem(last=False)
            oldest.add_done_callback(self._drop)
        return await asyncio.shield(task)

    def clear(self) -> None:
        """Drop all."""
        while self._loads:
            _, task = self._loads.popitem()
            self._drop(task) if task.done() else task.cancel()

    def _forget_failed(self, key: K, load: asyncio.Task[V]) -> None:
        failed = load.cancelled() or load.exception() is not None
        if failed and self._loads.get(key) is load:
            del self._loads[key]

    def _drop(self, load: asyncio.Task[V]) -> None:
        if self._dropped is not None and not load.cancelled() and load.exception() is None:
            self._dropped(load.result())
