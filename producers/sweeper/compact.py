"""Compacts settled streams into blocks: the same events in a fraction of the memory.

    settled for a minute -> its entries, a page at a time -> blocks -> COMPACT: they take the stream's place at once
    large ones              -> note ─▶ a blob ─▶ COMPACT: a reference to it takes the stream's place
    a reader asks for the stream, then for the block of its position: one of the two is there, whenever it comes

The blocks' form is in `producers.contract.stream`. What cannot be written to a blob stays in the store.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from redis.exceptions import OutOfMemoryError

from producers.client.aio import AsyncClient
from producers.client.steps import Read, once
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import ms, text
from producers.contract import keys
from producers.contract.stream import BLOCK, pack, stream_position
from producers.store import files, protocol
from producers.store.blobs import Blobs
from producers.store.references import Reference

log = logging.getLogger(__name__)

#: Time (ms) between a task's settlement and its stream's compaction; followers have read the end by then.
AGE_MS: Final = 60_000
#: Ids read at a time.
PAGE: Final = 100
#: Streams read in one round trip.
BATCH: Final = 10
#: Streams whose blocks are in memory at a time.
AT_ONCE: Final = 4
#: Time (s) for which results stay in the store after one could not be moved to a file.
REST_S: Final = 60.0


@dataclass(slots=True)
class Compacted:
    """Numbers of compacted streams, of their entries, and of their blocks' bytes. `moved`: streams in blobs."""

    streams: int = 0
    entries: int = 0
    size: int = 0
    moved: int = 0


@dataclass(slots=True)
class Offload:
    """The place of blocks that have `min_size` bytes or more together. After a failure, none go there for REST_S."""

    blobs: Blobs
    min_size: int
    rests_until: float = 0.0

    def takes(self, size: int) -> bool:
        return size >= self.min_size and time.monotonic() >= self.rests_until


async def compact(client: AsyncClient, age_ms: int = AGE_MS, offload: Offload | None = None) -> Compacted:
    """Compact every stream whose record was settled for `age_ms` (server time). Without `offload`, into the store.

    Any number of processes may do so at once and be killed anywhere: COMPACT is one call. Raises
    redis.exceptions.RedisError or OSError if the store is away.
    """
    done = Compacted()
    until = ms(await client.store.time()) - age_ms
    kept = 0
    while True:
        query = ("ZRANGEBYSCORE", keys.SETTLED, "-inf", until, "LIMIT", kept, PAGE)
        (page,) = await client.run(once(Read((query,))))
        ids = [text(task_id) for task_id in page]
        for start in range(0, len(ids), BATCH):
            kept += await _compact_page(client, ids[start : start + BATCH], done, offload)
        if len(page) < PAGE:
            return done


async def _compact_page(client: AsyncClient, ids: Sequence[str], done: Compacted, offload: Offload | None) -> int:
    """Compact these streams, at once. Returns how many stay in the index: unreadable ones, or changed meanwhile."""
    commands = [command for task_id in ids for command in (("HGET", keys.task(task_id), "settled"), _page(task_id, 0))]
    answers = await client.run(once(Read(tuple(commands))))
    at_once = asyncio.Semaphore(AT_ONCE)

    async def compact_bounded(task_id: str, settled: bytes | None, first: list[Any]) -> bool:
        async with at_once:
            return await _compact_stream(client, task_id, settled, first, done, offload)

    return sum(await asyncio.gather(*map(compact_bounded, ids, answers[::2], answers[1::2])))


async def _compact_stream(
    client: AsyncClient, task_id: str, settled: bytes | None, first: list[Any], done: Compacted, offload: Offload | None
) -> bool:
    """Compact a stream. Returns whether it stays in the index."""
    blocks, count, whole = await _blocks(client, task_id, first)
    if not whole and first:
        log.error("the stream of task %s has a hole or no end: it is left as it is until it expires", task_id)
        await client.store.zrem(keys.SETTLED, task_id)
        return False
    size = sum(map(len, blocks))
    reference = None if offload is None or not offload.takes(size) else await _offload(client, offload, task_id, blocks)
    inline_blocks = [] if reference is not None else blocks
    answer = text(await client.run(once(protocol.compact(task_id, int(settled or 0), count, inline_blocks, reference))))
    if answer == "done":
        done.streams += 1
        done.entries += count
        done.size += size
        done.moved += reference is not None
    elif offload is not None and reference is not None:
        await files.remove(client.store, offload.blobs, reference.name)
    return answer in ("changed", "late")


async def _offload(client: AsyncClient, offload: Offload, task_id: str, blocks: Sequence[bytes]) -> Reference | None:
    """Write the blocks to a blob. None where that fails: a bucket that is away must not fill the store with streams."""
    reference = Reference(
        offload.blobs.location, f"result-{secrets.token_hex(16)}", tuple(accumulate(map(len, blocks)))
    )
    try:
        await files.note(client.store, reference.name)
        await asyncio.to_thread(_write, offload.blobs, reference.name, blocks)
    except (OutOfMemoryError, OSError) as error:
        offload.rests_until = time.monotonic() + REST_S
        warn_throttled(
            log, "the result of task %s stays in the store: it cannot be moved to a file: %s", task_id, error
        )
        return None
    return reference


def _write(blobs: Blobs, name: str, blocks: Sequence[bytes]) -> None:
    with blobs.writer(name) as writer:
        for block in blocks:
            writer.write(block)
        writer.commit()


async def _blocks(client: AsyncClient, task_id: str, page: list[Any]) -> tuple[list[bytes], int, bool]:
    """The stream's blocks, its number of entries, and whether it is complete. `page`: its first page."""
    blocks: list[bytes] = []
    count, whole, last = 0, True, b""
    while page:
        whole = whole and [stream_position(name) for name, _ in page] == list(range(count, count + len(page)))
        count += len(page)
        entries = [fields[b"e"] for _, fields in page]
        last = entries[-1]
        blocks.append(await asyncio.to_thread(pack, entries))
        if len(page) < BLOCK:
            break
        (page,) = await client.run(once(Read((_page(task_id, count),))))
    return blocks, count, whole and bool(last) and "end" in json.loads(last)


def _page(task_id: str, position: int) -> tuple[str | int, ...]:
    return ("XRANGE", keys.stream(task_id), f"{position + 1}-0", "+", "COUNT", BLOCK)
