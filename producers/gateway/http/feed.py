"""Waits for what a stream of server-sent events is to send next: a chunk, a heartbeat, or its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

HEARTBEAT: Final = b": still here\n\n"


class Feed:
    """Chunks as they come, or a heartbeat after so many seconds without, until they end or `stop` is set.

    One task asks for them all, and one timer runs: a task and a timer for each chunk took as long as all the rest.
    """

    def __init__(self, chunks: AsyncGenerator[bytes], stop: asyncio.Future[Any], heartbeat: float) -> None:
        self._stop = stop
        self._heartbeat = heartbeat
        self._ready: bytes | None = None
        self._given = True
        """Nobody waits for a chunk any more: the next one may be asked for."""
        self._quiet = False
        self._news, self._taken = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(heartbeat, self._beat)
        self._task = asyncio.create_task(self._pump(chunks))
        for end in (stop, self._task):
            end.add_done_callback(self._tell)

    @property
    def ended(self) -> bool:
        return self._task.done()

    async def next(self) -> bytes | None:
        """The next chunk; None at the end. Raises what the chunks raise. The reader has taken the one before."""
        self._heard = self._loop.time()
        if self._given:
            self._given = False
            self._taken.set()
        while True:
            if self._ready is not None:
                chunk, self._ready, self._given = self._ready, None, True
                return chunk
            if self._task.done():
                self._task.result()
                return None
            if self._stop.done():
                return None
            if self._quiet:
                self._quiet = False
                return HEARTBEAT
            self._news.clear()
            await self._news.wait()

    async def close(self) -> None:
        self._timer.cancel()
        self._task.cancel()
        await asyncio.wait((self._task,))
        if not self._task.cancelled():
            self._task.exception()  # or asyncio complains that nobody asked

    async def _pump(self, chunks: AsyncGenerator[bytes]) -> None:
        while True:
            await self._taken.wait()
            self._taken.clear()
            chunk = await anext(chunks, None)
            if chunk is None:
                return
            self._ready = chunk
            self._news.set()

    def _tell(self, _: object) -> None:
        self._news.set()

    def _beat(self) -> None:
        left = self._heard + self._heartbeat - self._loop.time()
        if left <= 0:
            self._quiet, left = True, self._heartbeat
            self._news.set()
        self._timer = self._loop.call_later(left, self._beat)
