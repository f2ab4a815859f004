"""Sends from an event loop: what is sent at the same time goes in one request.

    put -> waiting, by list -> a request of up to ten, at the next turn of the loop

Nothing waits for company: only once `most` requests are under way do messages gather.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from producers.broker.sqs.sending.outgoing import BATCH, Outgoing

#: Sends messages to a list. Returns what went wrong with each, None where nothing did; an exception is that of all.
Send = Callable[[str, Sequence[Outgoing]], Awaitable[Sequence[Exception | None]]]


class Batcher:
    """`most`: requests at a time; `in_order`: one at a time for each list, so that none overtakes another."""

    def __init__(self, send: Send, most: int, *, in_order: bool) -> None:
        self._send, self._most, self._in_order = send, most, in_order
        self._waiting: dict[str, deque[tuple[Outgoing, asyncio.Future[None]]]] = {}
        self._running: dict[asyncio.Task[None], str] = {}
        self._due = False

    def put(self, name: str, message: Outgoing) -> asyncio.Future[None]:
        """Done once the message is sent. A future that is cancelled before it is under way is not sent."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.setdefault(name, deque()).append((message, future))
        if not self._due:
            self._due = True
            loop.call_soon(self._start)
        return future

    def close(self) -> None:
        """Nothing more is sent; who waits for it is cancelled."""
        for task in self._running:
            task.cancel()
        for _, future in [one for waiting in self._waiting.values() for one in waiting]:
            future.cancel()
        self._waiting.clear()

    def _start(self) -> None:
        """Begin as many requests as may be under way, a list after the other."""
        self._due = False
        while len(self._running) < self._most and (name := self._first()) is not None:
            if batch := self._next(name):
                task = asyncio.create_task(self._run(name, batch))
                self._running[task] = name
                task.add_done_callback(self._ended)

    def _first(self) -> str | None:
        held = self._running.values() if self._in_order else ()
        return next((name for name in self._waiting if name not in held), None)

    def _next(self, name: str) -> list[tuple[Outgoing, asyncio.Future[None]]]:
        waiting = self._waiting.pop(name)
        batch: list[tuple[Outgoing, asyncio.Future[None]]] = []
        while waiting and len(batch) < BATCH:
            message, future = waiting.popleft()
            if not future.done():
                batch.append((message, future))
        if waiting:
            self._waiting[name] = waiting  # the last now: the other lists come first
        return batch

    async def _run(self, name: str, batch: Sequence[tuple[Outgoing, asyncio.Future[None]]]) -> None:
        outcomes: Sequence[Exception | None]
        try:
            outcomes = await self._send(name, [message for message, _ in batch])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is for those who wait
            outcomes = [error] * len(batch)
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self._start()
