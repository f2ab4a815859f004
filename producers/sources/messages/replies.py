"""Sends the replies of one source: rows of the outbox, due when a task ends or a message is refused.

    TAKE ─▶ allowed? ─▶ the task's outputs ─▶ send ─▶ DELIVERED      a failure: RETRY, after TRIES of them DEAD

Killed anywhere, a row is due again once its lease ends: a reply may come twice, with the same id.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any, Final

from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, once, persistently
from producers.client.wake import wake
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call
from producers.connection.trouble import error_text
from producers.sources.aws import too_large
from producers.sources.messages import answer
from producers.sources.messages.answer import Reply
from producers.sources.messages.targets import Targets, allowed
from producers.sources.source import together
from producers.store import outbox
from producers.store.outbox import Attempt, Row

log = logging.getLogger(__name__)

#: Most rows that are sent at a time, and their lease (ms): longer than any try.
MOST: Final = 32
LEASE_MS: Final = 60_000
#: Longest try (s), and longest time for telling the store how it ended.
TRY_S, PATIENCE_S = 40.0, 8.0
#: Time (s) for what is on its way when the process stops.
END_S: Final = 5.0
#: Longest time (s) between two looks: rows become due silently, and a wake-up may be lost.
LOOK_S: Final = 1.0
#: Longest pause (s) between two tries, and the try after which a reply is given up: with these pauses, after three days
#: of tries. Tries are counted, not time, so that a reply that is old, or is replayed, has all of them.
LONGEST_S: Final = 300.0
TRIES: Final = 873


class Replies:
    """Sends a source's replies, to targets that fit one of `patterns`. `waiting`: connections to the store that may
    wait; `default`: the settings' own target."""

    def __init__(
        self,
        name: str,
        client: AsyncClient,
        waiting: Redis,
        targets: Targets,
        patterns: Sequence[str],
        default: str | None,
    ) -> None:
        self._name, self._client, self._waiting = name, client, waiting
        self._targets, self._patterns, self._default = targets, patterns, default
        self._due = asyncio.Event()
        self.trouble = ""
        """Why the last reply to the settings' own target was not sent; empty if it was. A target that a message names
        shows nothing of this process."""

    async def run(self) -> None:
        """Send until cancelled; then what is on its way may end for END_S seconds. The rest is due after its lease."""
        try:
            await together(wake(self._waiting, self._due, self._name), self._send_due())
        finally:
            self._targets.close()

    async def _send_due(self) -> None:
        while True:
            self._due.clear()
            try:
                again = await self._whole_round()
            except FAILURES as error:
                warn_throttled(log, "the store does not answer, trying again: %s", error)
                again = False
            if not again:
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._due.wait()
                except TimeoutError:
                    pass

    async def _whole_round(self) -> bool:
        """A round that ends, if it can, also when this is cancelled."""
        sending = asyncio.create_task(self._round())
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait((sending,), timeout=END_S)
            sending.cancel()
            raise

    async def _round(self) -> bool:
        """Send what is due. Returns whether there may be more."""
        holder = uuid.uuid4().hex
        found = await self._client.run(once(outbox.take(holder, MOST, LEASE_MS, self._name)))
        rows = outbox.read_take(found).rows
        await asyncio.gather(*(self._end(row, holder) for row in rows))
        return len(rows) == MOST

    async def _end(self, row: Row, holder: str) -> None:
        """Try a row once, and store how that ended. If the store stays away, the row's lease ends."""
        began, at = time.monotonic(), int(time.time())

        def tried(error: str = "") -> Attempt:
            return Attempt(at, round(1000 * (time.monotonic() - began)), error=error[:1024])

        reply = None
        try:
            reply = Reply.parse(row.reply or "")
            if not allowed(reply.url, self._patterns):
                raise ValueError("the source's settings do not allow this target any more")
            async with asyncio.timeout(TRY_S):
                await self._send(row, reply)
            call = outbox.delivered(row, holder, tried())
            self._note(reply, "")
        except FAILURES as error:
            self._note(reply, error_text(error))
            call = self._failed(row, holder, tried(error_text(error)), error)
        except Exception as error:  # what no retry mends must not be tried for ever
            log.exception("reply %s is given up", row.name)
            call = outbox.dead(row, holder, tried(f"{type(error).__name__}: {error}"))
        try:
            await self._client.run(persistently(call, PATIENCE_S))
        except FAILURES as error:
            warn_throttled(log, "the end of a reply could not be stored, it will be sent again: %s", error)

    def _failed(self, row: Row, holder: str, attempt: Attempt, error: BaseException) -> Call:
        """The call that says that a try failed: it is made again after a pause, or it was the last."""
        if row.tries + 1 >= TRIES:
            log.error("reply %s is given up after %d tries: %s", row.name, row.tries + 1, error)
            return outbox.dead(row, holder, attempt)
        warn_throttled(log, "a reply is not sent yet: %s", error)
        return outbox.retry(row, holder, int(1000 * min(LONGEST_S, 2.0**row.tries)), attempt)

    def _note(self, reply: Reply | None, trouble: str) -> None:
        if reply is not None and reply.url == self._default:
            self.trouble = trouble

    async def _send(self, row: Row, reply: Reply) -> None:
        task = await answer.task_of(self._client, row, reply)
        try:
            await self._send_task(row, reply, task)
        except FAILURES as error:
            if not too_large(error) or task["choices"] is None:
                raise
            await self._send_task(row, reply, answer.shortened(task))

    async def _send_task(self, row: Row, reply: Reply, task: dict[str, Any]) -> None:
        body, content_type = answer.body_of(row, reply, task)
        async with asyncio.timeout(TRY_S / 2):
            await self._targets.send(reply.url, body, key=row.webhook_id, content_type=content_type)
