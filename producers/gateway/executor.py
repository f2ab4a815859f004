"""A few threads for one kind of work, in turns of those who ask for it.

run ─▶ a thread is free ──────────────────────────────▶ work on the thread ─▶ its answer
    ─▶ none is: a queue of its tenant's own ─▶ its turn ─▶
    ─▶ too many wait: refused, or the last one of the tenant with the longest queue

Queues and counts belong to the event loop, so nothing is locked. Only the work itself runs on a thread.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from producers.gateway.fair_share import SHARE, Share

T = TypeVar("T")


class ExecutorClosed(Exception):
    """The executor is closed and takes no more work."""


class ExecutorBusy(Exception):
    """The work was dropped: earlier work took so long that it did not begin in time."""


class CallerLeft(Exception):
    """The work was ended: nobody waits for it any more."""


class ExecutorFull(Exception):
    """The work was dropped: too much waits, and its tenant has the most of it, or as much as others."""


@dataclass(slots=True, eq=False)
class _Job:
    """`begun`: there where it had to wait. `done`: cancelled once its caller has left. `share`: to which its time is
    charged."""

    work: Callable[[], Any]
    tenant: str
    done: asyncio.Future[Any]
    begun: asyncio.Future[None] | None = None
    share: Share | None = None


class Executor:
    """Runs work on daemon threads, so that work that never ends does not keep the process alive.

    Tenants take turns; one has a second thread only while no other waits. Use it from one event loop.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        #: Work for the threads: never more than there are threads, until the executor is closed.
        self._handed: queue.SimpleQueue[_Job | Callable[[], Any] | None] = queue.SimpleQueue()
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._queued = 0
        self._running: Counter[str] = Counter()
        self._threads = self._free = threads
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        for _ in range(threads):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def waiting(self) -> int:
        """Number of queued and running jobs. A running one counts until it ends, also if its caller has left."""
        return self._queued + self._threads - self._free

    async def run(
        self,
        work: Callable[[], T],
        *,
        tenant: str = "",
        max_jobs: int | None = None,
        patience: float | None = None,
        limit: float | None = None,
    ) -> T:
        """Run `work` on a thread. Returns or raises what it does.

        Raises ExecutorFull if `max_jobs` jobs wait and run already, unless another tenant has more of them waiting:
        then the last of those is refused in its place. Raises ExecutorBusy if it has not begun after `patience`
        seconds, TimeoutError `limit` seconds after it began (the work itself goes on), and ExecutorClosed.
        """
        if self._closed:
            raise ExecutorClosed
        loop = self._loop = asyncio.get_running_loop()
        job = _Job(work, tenant, loop.create_future(), share=SHARE.get())
        if max_jobs is not None and self.waiting >= max_jobs:
            self._make_room(tenant)
        if self._free and not self._queues:
            self._begin(job)
        else:
            await self._turn(job, loop.create_future(), patience)
        async with asyncio.timeout(limit):
            return await job.done  # type: ignore[no-any-return]

    async def run_killable(
        self, work: Callable[[], T], kill: Callable[[], None], caller_left: Callable[[], Awaitable[None]], **turn: Any
    ) -> T:
        """Run work that `kill` ends. `turn`: arguments of `run`. The work is killed if it runs when its caller is
        cancelled, or when `caller_left` returns: then this raises CallerLeft. The executor has one thread, or `kill`
        ends no other work than this."""
        began, ended = False, False

        def noted() -> T:
            nonlocal began, ended
            began = True
            try:
                return work()
            finally:
                ended = True

        running = asyncio.ensure_future(self.run(noted, **turn))
        leaving = asyncio.ensure_future(caller_left())
        try:
            await asyncio.wait((running, leaving), return_when="FIRST_COMPLETED")
            if not running.done():
                raise CallerLeft
            return running.result()
        finally:
            leaving.cancel()
            running.cancel()
            # The next work begins on this event loop, so what one thread runs now can be no other.
            if began and not ended:
                kill()

    def close(self, last: Callable[[], Any] | None = None) -> None:
        """End the threads after all queued jobs and then `last`. Returns at once."""
        self._closed = True
        while self._queues:
            self._begin(self._next())
        if last is not None:
            self._handed.put(last)
        for _ in range(self._threads):
            self._handed.put(None)

    # ---- on the event loop ---------------------------------------------------------------------------------------

    async def _turn(self, job: _Job, begun: asyncio.Future[None], patience: float | None) -> None:
        """Wait until the job has begun."""
        job.begun = begun
        self._queues.setdefault(job.tenant, deque()).append(job)
        self._queued += 1
        try:
            async with asyncio.timeout(patience):
                await begun
        except TimeoutError:
            if begun.cancelled():
                raise ExecutorBusy from None
        finally:
            if not begun.done() or begun.cancelled():
                self._remove(job)

    def _make_room(self, tenant: str) -> None:
        """Refuse the last job of the longest queue. Raises ExecutorFull where that would be the newcomer's own, or one
        of a tenant that has no more than it."""
        longest = max(self._queues, key=lambda name: len(self._queues[name]), default=tenant)
        if longest == tenant or len(self._queues[longest]) <= len(self._queues.get(tenant, ())) + 1:
            raise ExecutorFull
        job = self._queues[longest][-1]
        self._remove(job)
        if job.begun is not None and not job.begun.done():
            job.begun.set_exception(ExecutorFull())

    def _remove(self, job: _Job) -> None:
        waiting = self._queues.get(job.tenant)
        if waiting is None or job not in waiting:
            return
        waiting.remove(job)
        self._queued -= 1
        if not waiting:
            del self._queues[job.tenant]

    def _next(self) -> _Job:
        """Take the job whose turn it is: of the tenant that waits for longest among those of whom none runs."""
        tenant = next((name for name in self._queues if not self._running[name]), next(iter(self._queues)))
        waiting = self._queues[tenant]
        job = waiting.popleft()
        self._queued -= 1
        if waiting:
            self._queues.move_to_end(tenant)
        else:
            del self._queues[tenant]
        return job

    def _begin(self, job: _Job) -> None:
        if job.begun is not None:
            if job.begun.done():  # its caller has just given up
                return
            job.begun.set_result(None)
        self._free -= 1
        self._running[job.tenant] += 1
        self._handed.put(job)

    def _ended(self, job: _Job, used: float, answer: Any, error: BaseException | None) -> None:
        self._free += 1
        if job.share is not None:
            job.share.used += used
        self._running[job.tenant] -= 1
        if not self._running[job.tenant]:
            del self._running[job.tenant]
        if not job.done.done():
            job.done.set_result(answer) if error is None else job.done.set_exception(error)
        while self._free > 0 and self._queues:
            self._begin(self._next())

    # ---- on a thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._handed.get()) is not None:
            if not isinstance(job, _Job):
                job()
                continue
            answer: Any = None
            error: BaseException | None = None
            began = time.perf_counter()
            try:
                answer = job.work()
            except BaseException as raised:  # noqa: BLE001 - it is raised where it is waited for
                error = raised
            assert self._loop is not None  # whoever asked for it runs on one
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self._ended, job, time.perf_counter() - began, answer, error)
            del job, answer, error  # else they are kept until the next one comes
