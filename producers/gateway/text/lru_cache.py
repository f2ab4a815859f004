"""An LRU cache for asyncio that loads each value once for all concurrent callers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps at most `most` values. `dropped` is called with each evicted value. Use it from one event loop."""

    def __init__(self, most: int, dropped: Callable[[V], None] | None = None) -> None:
        self._most = most
        self._dropped = dropped
        # Each load is a task that all its callers await, so that it happens once.
        self._loads: OrderedDict[K, asyncio.Task[V]] = OrderedDict()

    async def get(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The value of a key, loaded if needed. Raises what `load` raises; the next call tries again."""
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
        """Evict all values."""
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
