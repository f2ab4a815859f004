"""Works through an inbox: each message is handled until it is done or bad, and hidden from others meanwhile.

    receive ─▶ handle ─▶ remove            handle raises BadMessage ─▶ bury
                 ▲  └─ a server is away: wait, and handle again; nothing more is received

If the process is killed anywhere, the message is received again when it is no longer hidden. So `handle` may be called
twice for a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from producers.client.steps import FAILURES, backoff
from producers.connection.log_throttle import warn_throttled
from producers.connection.trouble import Trouble, error_text, trouble
from producers.errors import SubmitFailed, shown
from producers.sources.inbox import BadMessage, Inbox, Received
from producers.sources.source import ended

log = logging.getLogger(__name__)

#: Receives that are worked on at a time.
PARALLEL: Final = 4
#: Longest time (s) for giving a message back when the process stops.
BACK_S: Final = 5.0
#: Errors of `handle` for a server that is away or full; the message is handled again.
RETRIED: Final = (*FAILURES, SubmitFailed)


class Consumer:
    """Consumes one inbox. `handle`: processes a message; it may be called again for the same message.

    `removed`: called with messages after their removal, unless the process dies in between.
    """

    def __init__(
        self,
        name: str,
        inbox: Inbox,
        handle: Callable[[Received], Awaitable[None]],
        removed: Callable[[Sequence[Received]], Awaitable[None]] | None = None,
    ) -> None:
        self._name, self._inbox, self._handle, self._removed = name, inbox, handle, removed
        self._receives = ""
        self._stalled: dict[str, str] = {}
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def trouble(self) -> str:
        """The reason why nothing is received now; empty while messages are received."""
        return next(iter(self._stalled.values()), self._receives)

    async def run(self) -> None:
        """Consume until cancelled, then give back what is not done. Raises what the inbox raises, but for a server
        that is away."""
        await self._inbox.open()
        places, working = asyncio.Semaphore(PARALLEL), set[asyncio.Task[None]]()
        try:
            while True:
                await places.acquire()
                await self._flows.wait()
                if messages := await self._received():
                    task = asyncio.create_task(self._work(messages))
                    working.add(task)
                    task.add_done_callback(working.discard)
                    task.add_done_callback(lambda _: places.release())
                else:
                    places.release()
        finally:
            await ended(working)

    async def _received(self) -> list[Received]:
        """Returns the next messages. A call that waits at the server goes on when this is cancelled; its messages are
        then given back."""
        call = asyncio.ensure_future(self._inbox.receive())
        try:
            messages = await asyncio.shield(call)
        except asyncio.CancelledError:
            with suppress(*FAILURES):
                await self._back(await call)
            raise
        except FAILURES as error:
            if trouble(error) is not Trouble.AWAY:
                raise
            self._receives = error_text(error)
            warn_throttled(log, "cannot receive, trying again: %s", error)
            await asyncio.sleep(1.0)
            return []
        self._receives = ""
        return messages

    async def _work(self, messages: Sequence[Received]) -> None:
        """Handle messages of one receive, and remove those that are done."""
        unfinished = {message.id: message for message in messages}
        hiding = asyncio.create_task(self._keep_hidden(unfinished))
        try:
            await asyncio.gather(*(self._handled(message, unfinished) for message in messages))
            if unfinished:
                done = list(unfinished.values())
                await self._until_done(done[0].id, partial(self._inbox.remove, done))
                unfinished.clear()
                if self._removed is not None:
                    with suppress(*FAILURES):
                        await self._removed(done)
        except asyncio.CancelledError:
            await self._back(list(unfinished.values()))
            raise
        finally:
            hiding.cancel()

    async def _handled(self, message: Received, unfinished: dict[str, Received]) -> None:
        """Handle a message. A bad message goes to the dead letters, and is removed from `unfinished`."""
        try:
            return await self._until_done(message.id, partial(self._handle, message))
        except BadMessage as bad:
            reason = str(bad)
            log.warning("%s: message %s is refused: %s", self._name, shown(message.id), reason)
        except Exception as error:  # a bug here must not make a message that is tried for ever
            reason = f"{type(error).__name__} in the sources process"
            log.exception("message %s of %s failed here", shown(message.id), self._name)
        await self._until_done(message.id, partial(self._inbox.bury, message, reason))
        del unfinished[message.id]

    async def _until_done(self, message_id: str, work: Callable[[], Awaitable[None]]) -> None:
        """Call `work` until it succeeds. While a server is away, nothing more is received."""
        attempt = 0
        try:
            while True:
                try:
                    return await work()
                except RETRIED as error:
                    self._stalled[message_id] = error_text(error)
                    self._flows.clear()
                    warn_throttled(log, "a message is held until this is over: %s", error)
                await asyncio.sleep(backoff(attempt))
                attempt += 1
        finally:
            self._stalled.pop(message_id, None)
            if not self._stalled:
                self._flows.set()

    async def _keep_hidden(self, messages: dict[str, Received]) -> None:
        while True:
            await asyncio.sleep(self._inbox.hidden_s / 2)
            try:
                await self._inbox.hide(list(messages.values()), self._inbox.hidden_s)
            except FAILURES as error:  # others may receive them, too: what they make is the same
                warn_throttled(log, "messages are not hidden from others: %s", error)

    async def _back(self, messages: Sequence[Received]) -> None:
        """Give messages back. If the server is away, they come back by themselves."""
        with suppress(*FAILURES):
            async with asyncio.timeout(BACK_S):
                await self._inbox.hide(messages, 0)
