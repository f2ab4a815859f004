"""Runs an event loop on its own thread, so that a blocking client can use the asyncio reader."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from producers.client.hub import CLOSED
from producers.errors import PenstockError

FORKED = "this stream was opened before a fork: open it again"

T = TypeVar("T")


class Expired(Exception):
    """The call did not end in time."""


class Portal:
    """Runs coroutines for other threads. It does not survive a fork: see `usable`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        #: Guards hand-overs to the loop: a coroutine handed over after its end would never run or fail. Reentrant: the
        #: garbage collector may close a forgotten stream at any point, which calls `soon`.
        self._lock = threading.RLock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock reader", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether it can be used: not closed, and not in a forked child, which lacks the thread."""
        return self._pid == os.getpid() and not self._closed

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and return its result.

        Raises Expired after `timeout` seconds; then, and when interrupted, the coroutine is cancelled. Raises
        PenstockError if the portal is closed, before or meanwhile, and in a forked child.
        """
        if self._pid != os.getpid():  # its lock may be held by a thread that does not exist here
            coroutine.close()
            raise PenstockError(FORKED)
        with self._lock:
            if self._closed:
                coroutine.close()
                raise PenstockError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        except CancelledError:
            raise PenstockError(CLOSED) from None
        except TimeoutError:
            if future.done():
                raise
            raise Expired from None
        finally:
            future.cancel()

    def soon(self, function: Callable[[], object]) -> None:
        """Schedule a call on the loop; does nothing if the loop has ended."""
        if self.usable:  # in a forked child the lock may be held by a thread that does not exist
            with self._lock:
                if not self._closed:
                    self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel the running coroutines and end the thread."""
        if not self.usable:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
