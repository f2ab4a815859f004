"""Compacts settled streams into blocks: the same events in a fraction of the memory.

    settled for a minute -> its entries, a page at a time -> blocks -> COMPACT: they take the stream's place at once
    a reader asks for the stream, then for the block of its position: one of the two is there, whenever it comes

The blocks' form is in `producers.contract.blocks`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.steps import Read, Step, Steps
from producers.connection.script import text
from producers.contract import keys
from producers.contract.blocks import BLOCK, pack
from producers.contract.events import stream_position
from producers.store import protocol

log = logging.getLogger(__name__)

#: Time (ms) between a task's settlement and its stream's compaction; followers have read the end by then.
AGE_MS: Final = 60_000
#: Ids read at a time.
PAGE: Final = 100
#: Streams read in one round trip.
BATCH: Final = 10


@dataclass(slots=True)
class Compacted:
    """Numbers of compacted streams, of their entries, and of their blocks' bytes."""

    streams: int = 0
    entries: int = 0
    size: int = 0


async def compact(client: AsyncClient, age_ms: int = AGE_MS) -> Compacted:
    """Compact every stream whose record was settled for `age_ms` (server time).

    Any number of processes may do so at once and be killed anywhere: COMPACT is one call. Raises
    redis.exceptions.RedisError or OSError if the store is away.
    """
    done = Compacted()
    seconds, micros = await client.store.time()
    until = seconds * 1000 + micros // 1000 - age_ms
    kept = 0
    while True:
        query = ("ZRANGEBYSCORE", keys.SETTLED, "-inf", until, "LIMIT", kept, PAGE)
        (page,) = await client.run(_ask(Read((query,))))
        ids = [text(task_id) for task_id in page]
        for start in range(0, len(ids), BATCH):
            kept += await _some(client, ids[start : start + BATCH], done)
        if len(page) < PAGE:
            return done


async def _some(client: AsyncClient, ids: Sequence[str], done: Compacted) -> int:
    """Compact these streams. Returns how many stay in the index: unreadable ones, or changed meanwhile."""
    asked = [command for task_id in ids for command in (("HGET", keys.task(task_id), "settled"), _page(task_id, 0))]
    answers = await client.run(_ask(Read(tuple(asked))))
    kept = 0
    for task_id, settled, first in zip(ids, answers[::2], answers[1::2], strict=True):
        blocks, count, whole = await _blocks(client, task_id, first)
        if not whole and first:
            log.error("the stream of task %s has a hole or no end: it is left as it is until it expires", task_id)
            await client.store.zrem(keys.SETTLED, task_id)
            continue
        answer = text(await client.run(_ask(protocol.compact(task_id, int(settled or 0), count, blocks))))
        if answer == "done":
            done.streams += 1
            done.entries += count
            done.size += sum(map(len, blocks))
        kept += answer == "changed"
    return kept


async def _blocks(client: AsyncClient, task_id: str, found: list[Any]) -> tuple[list[bytes], int, bool]:
    """The stream's blocks, its number of entries, and whether it is complete. `found`: its first page."""
    blocks: list[bytes] = []
    count, whole, last = 0, True, b""
    while found:
        whole = whole and [stream_position(name) for name, _ in found] == list(range(count, count + len(found)))
        count += len(found)
        entries = [fields[b"e"] for _, fields in found]
        last = entries[-1]
        blocks.append(await asyncio.to_thread(pack, entries))
        if len(found) < BLOCK:
            break
        (found,) = await client.run(_ask(Read((_page(task_id, count),))))
    return blocks, count, whole and bool(last) and "end" in json.loads(last)


def _page(task_id: str, position: int) -> tuple[str | int, ...]:
    return ("XRANGE", keys.stream(task_id), f"{position + 1}-0", "+", "COUNT", BLOCK)


def _ask(step: Step) -> Steps[Any]:
    return (yield step)
