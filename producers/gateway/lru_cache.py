"""An LRU cache for asyncio that loads each value once for all concurrent callers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Keeps at most `size` values, each for `fresh` seconds from when its load began. `dropped` is called with each
    value that makes room for others. Use it from one event loop."""

    def __init__(self, size: int, dropped: Callable[[V], None] | None = None, fresh: float = math.inf) -> None:
        self._size = size
        self._dropped = dropped
        self._fresh = fresh
        # Each load is a task that all its callers await, so that it happens once; and when it is too old.
        self._loads: OrderedDict[K, tuple[asyncio.Task[V], float]] = OrderedDict()

    async def get(self, key: K, load: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The value of a key, loaded if needed. Raises what `load` raises; the next call tries again."""
        task, began = self._loads.get(key, (None, 0.0))
        if task is None or time.monotonic() - began >= self._fresh:
            task = self._begin(key, load, task)
        self._loads.move_to_end(key)
        return await asyncio.shield(task)

    def clear(self) -> None:
        """Evict all values."""
        while self._loads:
            _, (task, _) = self._loads.popitem()
            self._drop(task) if task.done() else task.cancel()

    def _begin(
        self, key: K, load: Callable[[], Coroutine[Any, Any, V]], before: asyncio.Task[V] | None
    ) -> asyncio.Task[V]:
        task = asyncio.create_task(load())
        self._loads[key] = task, time.monotonic()
        task.add_done_callback(lambda done: self._forget_failed(key, done))
        if before is not None:
            before.add_done_callback(self._drop)
        elif len(self._loads) > self._size:
            _, (oldest, _) = self._loads.popitem(last=False)
            oldest.add_done_callback(self._drop)
        return task

    def _forget_failed(self, key: K, load: asyncio.Task[V]) -> None:
        failed = load.cancelled() or load.exception() is not None
        if failed and key in self._loads and self._loads[key][0] is load:
            del self._loads[key]

    def _drop(self, load: asyncio.Task[V]) -> None:
        if self._dropped is not None and not load.cancelled() and load.exception() is None:
            self._dropped(load.result())
