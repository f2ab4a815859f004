"""Ends a batch whose lines are all written, and tidies up after one that has ended.

    parts ─▶ one blob for each file ─▶ FILE_MADE ─▶ BATCH_END ─▶ parts removed ─▶ BATCH_CLOSE

The files' ids are functions of the batch's, so whoever goes on after a kill makes the same files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.connection.script import arun, text
from producers.contract import keys
from producers.store import batches, files, protocol
from producers.store.batches import Batch
from producers.store.blobs import BlobNotFound, Blobs
from producers.sweeper.batches.output import ERROR, OUTPUT

#: Tasks cancelled or forgotten in one round trip.
PAGE: Final = 500


class Finisher:
    """Ends batches."""

    def __init__(self, client: AsyncClient, blobs: Blobs) -> None:
        self._store = client.store
        self._blobs = blobs

    async def finish(self, batch: Batch) -> str:
        """End the batch if all lines are written. Returns its status then.

        Raises redis.exceptions.RedisError and OSError.
        """
        if batch.total is not None and batch.count("written") < batch.total:
            return batch.status
        try:
            made = {kind: await self._file(batch, kind) for kind in (OUTPUT, ERROR)}
        except BlobNotFound:  # another process has ended the batch, and removed its parts
            return batch.status
        return text(await arun(self._store, batches.end(batch.id, made[OUTPUT], made[ERROR])))

    async def _file(self, batch: Batch, kind: str) -> str | None:
        """The id of the batch's file of this kind, which is there then; None if it has no lines."""
        parts = [part.name for part in await batches.parts(self._store, batch.id) if part.kind == kind]
        if not parts:
            return None
        at = batch.time("created") or 0
        file_id = files.new_id(at, f"{batch.id}:{kind}")
        name = f"{batch.id}_{kind}.jsonl"
        about = files.File(file_id, 0, name, files.BATCH_OUTPUT, at // 1000, tenant=batch.tenant)
        await files.make(self._store, about, partial(self._blobs.join, file_id, parts), batch.output_kept_s)
        return file_id

    async def tidy(self, batch: Batch) -> None:
        """Remove what a batch that has ended leaves: parts, and the tasks of lines that nobody wrote."""
        ids = unwritten(batch)
        for start in range(0, len(ids), PAGE):
            await cancel(self._store, ids[start : start + PAGE])
            await arun(self._store, batches.drop(batch.id, ids[start : start + PAGE]))
        for name in await self._store.smembers(keys.batch_begun(batch.id)):
            await asyncio.to_thread(self._blobs.delete, text(name))
        await arun(self._store, batches.close(batch.id))

    async def cancel_lines(self, batch: Batch) -> None:
        """Cancel the tasks of all lines that have not ended."""
        ids = unwritten(batch)
        for start in range(0, len(ids), PAGE):
            await cancel(self._store, ids[start : start + PAGE])


def unwritten(batch: Batch) -> list[str]:
    """Ids of the tasks of lines that are expanded and not written. Some were refused, and have no task."""
    return [batches.task_id(batch.id, line) for line in range(batch.count("written"), batch.count("line"))]


async def cancel(store: Redis, ids: Sequence[str]) -> None:
    """CANCEL each of these tasks; one that has ended, or is gone, stays so."""
    calls = [protocol.cancel(name) for name in ids]
    async with store.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.execute_command(*(call.whole if call is calls[0] else call.command))
        await pipe.execute()
