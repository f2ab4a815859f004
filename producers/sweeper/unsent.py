"""Completes interrupted submits: sends the message of a record that stayed `submitting`, so that no task is lost.

The set `penstock:submitting` has their ids by age. A queued record is never sent again, since its message was
confirmed. Several processes may sweep: a second copy of a message finds its task claimed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from redis.exceptions import RedisError, WatchError

from producers.client.aio import AsyncClient
from producers.client.steps import lost
from producers.connection.script import arun, ms, text
from producers.contract import keys
from producers.contract.message import Message
from producers.contract.record import Record
from producers.store import protocol

log = logging.getLogger(__name__)

#: Records read at a time.
PAGE: Final = 100


@dataclass(slots=True)
class Swept:
    """A sweep's counts: messages sent, entries dropped that needed none, records that could not be sent."""

    sent: int = 0
    dropped: int = 0
    failed: int = 0


async def sweep(client: AsyncClient, age_ms: int = protocol.SWEEP_AGE_MS) -> Swept:
    """Send the message of every record that has been `submitting` for `age_ms` (server time).

    A record that is broken, or whose message the broker refuses, is logged and left for the next sweep. Raises
    redis.exceptions.RedisError or OSError if a server is away.
    """
    swept = Swept()
    until = ms(await client.store.time()) - age_ms
    while True:
        # Records that could not be sent stay in the set, before those that are not read yet.
        page = await client.store.zrangebyscore(keys.SUBMITTING, "-inf", until, start=swept.failed, num=PAGE)
        for task_id in map(text, page):
            try:
                await _one(client, task_id, swept)
            except (RedisError, OSError, KeyError, ValueError) as error:
                if lost(error):
                    raise
                log.exception("task %s is stuck in submitting and cannot be sent", task_id)
                swept.failed += 1
        if len(page) < PAGE:
            return swept


async def _one(client: AsyncClient, task_id: str, swept: Swept) -> None:
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
