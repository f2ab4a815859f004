"""Finishes what others left.

A record that stayed `submitting` is sent (again), so that no accepted task is lost: the set `penstock:submitting` names
them by age. A task whose reader is gone is cancelled (`producers.readers`), one that nobody runs is ended when its
deadline has passed (`producers.expiry`). Several sweepers may run: a message sent twice finds its task taken, and a
cancel may come twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from redis.exceptions import RedisError, WatchError

from producers import keys, protocol
from producers.aio import AsyncClient
from producers.expiry import expire_late
from producers.message import Message
from producers.readers import LEASE_S, LapsedReaders
from producers.record import Record
from producers.script import arun, text
from producers.steps import lost

log = logging.getLogger(__name__)

#: Records looked at in one go.
PAGE: Final = 100
#: Seconds between sweeps, on average.
EVERY_S: Final = 10.0
#: Seconds between looks at deadlines.
DEADLINES_EVERY_S: Final = 1.0
#: Seconds after which a sweep is broken off: a server accepts connections but does not answer.
LIMIT_S: Final = 60.0


@dataclass(slots=True)
class Swept:
    """What a sweep did: messages sent, entries dropped whose record needs none, records that could not be sent."""

    sent: int = 0
    dropped: int = 0
    failed: int = 0


async def sweep(client: AsyncClient, age_ms: int = protocol.SWEEP_AGE_MS) -> Swept:
    """Look once at every record that has been `submitting` for `age_ms` (server time).

    A record that is broken, or that the broker refuses, is logged and left for the next sweep. Raises
    redis.exceptions.RedisError or OSError where a server is away: then none of the others could be sent either.
    """
    swept = Swept()
    seconds, micros = await client.store.time()
    until = seconds * 1000 + micros // 1000 - age_ms
    while True:
        # What could not be sent stays in the set, before what is still to be looked at.
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


async def run(client: AsyncClient, every_s: float = EVERY_S, reader_lease_s: float = LEASE_S) -> None:
    """Sweep until cancelled. `reader_lease_s`: of the gateways."""
    readers = LapsedReaders(reader_lease_s)
    async with asyncio.TaskGroup() as group:
        group.create_task(_repeat(lambda: _submits(client), every_s))
        group.create_task(_repeat(lambda: _readers(client, readers), readers.every_s))
        group.create_task(_repeat(lambda: _deadlines(client), DEADLINES_EVERY_S))


async def _repeat(work: Callable[[], Awaitable[None]], every_s: float) -> None:
    while True:
        try:
            async with asyncio.timeout(LIMIT_S):
                await work()
        except (RedisError, OSError) as error:
            log.warning("sweep broken off, trying again: %s", error)
        await asyncio.sleep(every_s * random.uniform(0.8, 1.2))  # noqa: S311 - keeps several sweepers apart


async def _submits(client: AsyncClient) -> None:
    swept = await sweep(client)
    if swept.sent or swept.failed:
        log.info("swept: %d sent, %d dropped, %d failed", swept.sent, swept.dropped, swept.failed)


async def _readers(client: AsyncClient, readers: LapsedReaders) -> None:
    if gone := await client.run(readers.sweep()):
        log.info("swept: %d tasks cancelled whose readers are gone", gone)


async def _deadlines(client: AsyncClient) -> None:
    if ended := await client.run(expire_late()):
        log.info("swept: %d tasks ended whose deadline had passed", ended)


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
    """Take the id off the set, unless its record was changed meanwhile: it may have been admitted anew."""
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
