"""A few threads for one model's work, separate from other models'."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


class ExecutorClosed(Exception):
    """The executor is closed and takes no more work."""


class ExecutorBusy(Exception):
    """The work was dropped: earlier work took so long that it did not begin in time."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    begun: Future[None] = field(default_factory=Future)
    done: Future[Any] = field(default_factory=Future)


class Executor:
    """Runs work in order on daemon threads, so that work that never ends does not keep the process alive.

    `waiting`: number of queued and running jobs. A queued job is dropped when its caller gives up.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: set[Future[Any]] = set()
        self._threads = threads
        self._closed = False
        for _ in range(threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    async def run(self, work: Callable[[], T], *, patience: float | None = None, limit: float | None = None) -> T:
        """Run `work` on a thread. Returns or raises what it does.

        Raises ExecutorBusy if it has not begun after `patience` seconds, TimeoutError `limit` seconds after it began
        (the work itself goes on), and ExecutorClosed.
        """
        if self._closed:
            raise ExecutorClosed
        job = _Job(work)
        self._jobs.add(job.done)
        job.done.add_done_callback(self._jobs.discard)
        self._queue.put(job)
        try:
            try:
                async with asyncio.timeout(patience):
                    await asyncio.shield(asyncio.wrap_future(job.begun))
            except TimeoutError:
                if job.done.cancel():
                    raise ExecutorBusy from None
            async with asyncio.timeout(limit):
                # Shielded: a cancelled caller does not cancel running work.
                return await asyncio.shield(asyncio.wrap_future(job.done))
        finally:
            job.done.cancel()  # a running job counts as waiting until it ends

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """End the threads after all queued jobs and then `last`. Returns at once."""
        self._closed = True
        if last is not None:
            self._queue.put(_Job(last))
        for _ in range(self._threads):
            self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.done.set_running_or_notify_cancel():
                continue
            job.begun.set_result(None)
            try:
                answer = job.work()
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                job.done.set_exception(error)
            else:
                job.done.set_result(answer)
