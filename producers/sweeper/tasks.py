"""Finishes what dead processes left of tasks: interrupted submits, passed deadlines, final tasks that nobody settles.

    send_unsent  `penstock:submitting`: a record whose message was not sent, or not confirmed -> it is sent again
    expire_late  `penstock:deadlines`: unfinished tasks past their deadline, accepted cancels -> EXPIRE
    advance_parents  `penstock:waiting:parents`: tasks in chunks whose submitter is gone, chunks of ended ones -> PARENT
    Orphans      `penstock:unsettled`: final tasks whose messages no worker acknowledges -> ORPHAN

Gateways and the leading sweeper do this, several at a time: the second one finds nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from redis.exceptions import RedisError, WatchError

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES, Read, Steps, lost
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun, ms, text
from producers.contract import keys
from producers.contract.message import Message
from producers.contract.record import FINAL, Record
from producers.store import chunks, protocol

log = logging.getLogger(__name__)

#: Records read at a time.
UNSENT_PAGE: Final = 100
#: Ids read at a time.
PAGE: Final = 200
#: Time (ms) after which a task with a broken record is tried again.
BROKEN_MS: Final = 3_600_000
#: Time (ms) after which a final task is checked. Its worker has settled it by then, or its lease has lapsed.
UNSETTLED_AGE_MS: Final = 15_000
#: Time (ms) after which a task is settled without its message.
PATIENCE_MS: Final = 7 * 24 * 3600 * 1000
#: Number of sweeps after which tasks that were left are checked again.
ALL_EVERY: Final = 6


@dataclass(slots=True)
class Swept:
    """A sweep's counts: messages sent, entries dropped that needed none, records that could not be sent."""

    sent: int = 0
    dropped: int = 0
    failed: int = 0


async def send_unsent(client: AsyncClient, age_ms: int = protocol.SWEEP_AGE_MS) -> Swept:
    """Send the message of every record that has been `submitting` for `age_ms` (server time), so that no task is lost.

    The set `penstock:submitting` has their ids by age. A queued record is never sent again, since its message was
    confirmed. Several processes may sweep: a second copy of a message finds its task claimed.

    A record that is broken, or whose message the broker refuses, is logged and left for the next sweep. Raises
    redis.exceptions.RedisError or OSError if a server is away.
    """
    swept = Swept()
    until = ms(await client.store.time()) - age_ms
    while True:
        # Records that could not be sent stay in the set, before those that are not read yet.
        page = await client.store.zrangebyscore(keys.SUBMITTING, "-inf", until, start=swept.failed, num=UNSENT_PAGE)
        for task_id in map(text, page):
            try:
                await _send(client, task_id, swept)
            except (RedisError, OSError, KeyError, ValueError) as error:
                if lost(error):
                    raise
                log.exception("task %s is stuck in submitting and cannot be sent", task_id)
                swept.failed += 1
        if len(page) < UNSENT_PAGE:
            return swept


async def _send(client: AsyncClient, task_id: str, swept: Swept) -> None:
    record = Record.parse(task_id, await client.store.hgetall(keys.task(task_id)))
    if record.fields.get("status") == "submitting":
        await client.send(Message.of(record))
        await arun(client.store, protocol.queued(task_id))
        swept.sent += 1
    elif await _drop(client, task_id):
        swept.dropped += 1
    else:
        swept.failed += 1


async def _drop(client: AsyncClient, task_id: str) -> bool:
    """Remove the id from the set, unless its record changed meanwhile: it may be a new task of the same id."""
    async with client.store.pipeline(transaction=True) as pipe:
        await pipe.watch(keys.task(task_id))
        if await client.store.hget(keys.task(task_id), "status") == b"submitting":
            return False
        pipe.multi()
        pipe.zrem(keys.SUBMITTING, task_id)
        try:
            await pipe.execute()
        except WatchError:
            return False
    return True


def expire_late() -> Steps[int]:
    """End tasks without a worker whose deadline has passed, or whose cancel was accepted. Returns their number.

    A task that was started before (its worker died, or handed it back) is `incomplete` then; any other late one has
    failed. The set `penstock:deadlines` holds unfinished tasks by their deadline, in server time, and cancelled ones
    that CANCEL could not end, because a worker had them, or they were not sent yet. A worker ends the tasks that it
    runs itself; one that is still `submitting` is first sent by the sweeper. Raises redis.exceptions.RedisError or
    OSError.
    """
    (time,) = yield Read((("TIME",),))
    now = ms(time)
    ended = kept = 0
    while True:
        # Tasks that are left to others stay in the set, before those that are not read yet.
        query = ("ZRANGEBYSCORE", keys.DEADLINES, "-inf", now, "LIMIT", kept, PAGE)
        (page,) = yield Read((query,))
        for task_id in map(text, page):
            try:
                status = text((yield protocol.expire(task_id)))
            except FAILURES as error:
                if lost(error):
                    raise
                log.exception("task %s is past its deadline and cannot be ended, next try in an hour", task_id)
                yield Read((("ZADD", keys.DEADLINES, "XX", now + BROKEN_MS, task_id),))
                continue
            ended += status in ("failed", "incomplete", "cancelled")
            kept += status in ("submitting", "queued", "in_progress")
        if len(page) < PAGE:
            return ended


def advance_parents() -> Steps[int]:
    """Take open parents (`producers.store.chunks`) as far as they go: end those whose submitter is gone, and cancel the
    chunks of those that have ended. Returns the number of those that need nothing more."""
    tidied = kept = 0
    while True:
        (page,) = yield Read((("ZRANGE", keys.PARENTS, kept, kept + PAGE - 1),))
        for task_id in map(text, page):
            try:
                status, open_ = yield chunks.advance(task_id)
                while open_ and text(status) in FINAL:
                    status, open_ = yield chunks.advance(task_id)
            except FAILURES as error:
                if lost(error):
                    raise
                log.exception("task %s is in chunks and cannot be looked after", task_id)
                open_ = 1
            kept += open_
            tidied += not open_
        if len(page) < PAGE:
            return tidied


@dataclass(slots=True)
class Orphans:
    """Settles final tasks whose messages no worker acknowledges. Remembers which unsettled tasks it has checked.

        CANCEL, EXPIRE, UNREAD or FINISH made a record final -> `penstock:unsettled` -> its message's CLAIM, tracer,
        SETTLE ... but the worker died, the message is gone, or its pool has no worker: for a while -> ORPHAN

    A task that a client sent needs no message: it asks for no result and has no links. A plain Celery task's links and
    chord stand in its message alone, and a task that was given up leaves its message as a dead letter: those wait for a
    week for whoever gets the message. Their results are stored meanwhile (`producers.sweeper.celery_results`).
    """

    age_ms: int = UNSETTLED_AGE_MS
    patience_ms: int = PATIENCE_MS
    waiting: Callable[[str], None] = lambda task_id: None
    """Called now and then with each task that waits for its message."""
    _round: int = field(init=False, default=0)
    _after: int = field(init=False, default=0)

    def sweep(self) -> Steps[int]:
        """Settle orphaned tasks. Returns their number. Raises redis.exceptions.RedisError or OSError."""
        (time,) = yield Read((("TIME",),))
        now = ms(time)
        until = now - self.age_ms
        after = 0 if self._round % ALL_EVERY == 0 else self._after
        settled = kept = 0
        while True:
            query = ("ZRANGEBYSCORE", keys.UNSETTLED, f"({after}", until, "WITHSCORES", "LIMIT", kept, PAGE)
            (page,) = yield Read((query,))
            for task_id, at in zip(map(text, page[::2]), page[1::2], strict=True):
                gone = int(float(at)) < now - self.patience_ms
                answer = yield from self._settle(task_id, gone)
                settled += answer == "settled"
                kept += answer in ("owned", "message", "unusable")
            if len(page) < 2 * PAGE:
                break
        self._round, self._after = self._round + 1, until
        return settled

    def _settle(self, task_id: str, gone: bool) -> Steps[str]:
        try:
            answer = text((yield protocol.orphan(task_id, gone=gone)))
        except FAILURES as error:
            if lost(error):
                raise
            if gone:
                log.error("task %s is final and could not be settled for a week: left as it is: %s", task_id, error)
                yield Read((("ZREM", keys.UNSETTLED, task_id),))
                return "left"
            warn_throttled(log, "Task %s is final and cannot be settled, trying again: %s", task_id, error)
            return "unusable"
        if answer == "message":
            self.waiting(task_id)
        elif answer == "settled" and gone:
            log.warning("task %s is settled without its message, which nobody brought: its links are not sent", task_id)
        return answer
