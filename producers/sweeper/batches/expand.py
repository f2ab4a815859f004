"""Makes a task of each line of a batch, a block at a time.

    input from the cursor on ─▶ bodies ─▶ tasks or refusals ─▶ BATCH_EXPAND: records, refusals and cursor in one script
                                                          ─▶ messages ─▶ QUEUED

Killed after BATCH_EXPAND, the records stay `submitting`, and `producers.sweeper.unsent` sends their messages.

Only so many lines are in the store at a time that no input fills its memory: a line's record has its prompt, and stays
until its result is written. The next lines follow when results were written (`producers.sweeper.batches.write`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.submission import record_fields
from producers.connection.script import arun
from producers.contract.message import Message
from producers.contract.trace import trace_fields
from producers.store import batches
from producers.store.batches import Batch, Block
from producers.store.blobs import Ahead, Blobs
from producers.sweeper.batches.endpoint import Answer, Endpoints, Planned
from producers.sweeper.batches.reading import Requests, read_requests

#: Most lines in a block, and their bytes; one longer line is a block, too. A block keeps the store busy for some 5 ms.
BLOCK: Final = 250
BLOCK_BYTES: Final = 1 << 20
#: Most lines of a batch in the store, and their bytes in the input. Workers take thousands of lines a second at most.
WINDOW: Final = 20_000
WINDOW_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class _Ready:
    """A block to be made, and its messages."""

    block: Block
    messages: Sequence[Message]


class Expander:
    """Expands batches. `window`: most lines of a batch in the store."""

    def __init__(
        self, client: AsyncClient, blobs: Blobs, endpoints: Endpoints, *, block: int = BLOCK, window: int = WINDOW
    ) -> None:
        self._client = client
        self._blobs = blobs
        self._ahead = Ahead()
        self._endpoints = endpoints
        self._block = block
        self._window = window

    async def expand(self, batch: Batch, most: int) -> int:
        """Expand up to `most` lines. Returns their number; 0 if there is nothing to expand, or no room.

        While one block is written to the servers, the next one is made ready. Raises redis.exceptions.RedisError,
        OSError, BlobNotFound and BadLine.
        """
        line, offset, done = batch.count("line"), batch.count("offset"), 0
        coming = self._begin(batch, line, offset)
        while coming is not None and done < most:
            try:
                ready = await coming
            finally:
                coming.cancel()
            line, offset = line + ready.block.lines, ready.block.offset
            coming = self._begin(batch, line, offset) if done + ready.block.lines < most else None
            try:
                made = await self._make(batch, ready)
            except BaseException:
                if coming is not None:
                    coming.cancel()
                raise
            if not made:  # another sweeper leads by now, or the batch was cancelled, or is late
                break
            done += ready.block.lines
        if coming is not None:
            coming.cancel()
        return done

    def _begin(self, batch: Batch, line: int, offset: int) -> asyncio.Task[_Ready] | None:
        """Make the next block ready, in the background. None if there is none, or no room for it."""
        most = min(self._block, (batch.total or 0) - line, self._window - (line - batch.count("written")))
        size = min(BLOCK_BYTES, WINDOW_BYTES - (offset - batch.count("written_offset")))
        if most <= 0 or size <= 0:
            return None
        return asyncio.create_task(self._ready(batch, line, offset, most, size))

    async def _ready(self, batch: Batch, line: int, offset: int, most: int, size: int) -> _Ready:
        found = await asyncio.to_thread(read_requests, self._blobs, batch, line, offset, most, size, self._ahead)
        bodies = [request.body for request in found.requests]
        planned = await self._endpoints.tasks(batch.endpoint, bodies, batch.principal, batch.tenant or None)
        return await asyncio.to_thread(_block, batch, found, planned)

    async def _make(self, batch: Batch, ready: _Ready) -> bool:
        if not await arun(self._client.store, batches.expand(batch.id, ready.block, _shared(batch))):
            return False
        await self._client.broker.send_many(ready.messages)
        if ready.messages:
            await arun(self._client.store, batches.queued([message.id for message in ready.messages]))
        return True


def _shared(batch: Batch) -> Mapping[str, str | int]:
    """Fields of all records. They outlive the batch, until their results are written."""
    fields: dict[str, str | int] = {
        "origin": "batch",
        "batch": batch.id,
        "ttl": int(batch.fields["window"]) + batches.MARGIN_S,
        **trace_fields(batch.fields.get("traceparent")),
    }
    key = batch.principal.key
    return fields | ({"tenant": batch.tenant} if batch.tenant else {}) | ({"key": key} if key else {})


def _block(batch: Batch, found: Requests, planned: Sequence[Planned | Answer]) -> _Ready:
    made: list[tuple[str, Mapping[str, str | int]]] = []
    refusals: dict[int, str] = {}
    messages: list[Message] = []
    for line, plan in enumerate(planned, found.first):
        if isinstance(plan, Answer):
            refusals[line] = plan.to_json()
            continue
        task, name, fields = plan.task, batches.task_id(batch.id, line), _fields(batch, line, plan)
        made.append((name, fields))
        tokens, at = int(fields["tokens"]), plan.known.now_ms()
        messages.append(Message(name, plan.known.queue, task.tier, task.width, tokens, batch.tenant, at))
    return _Ready(Block(found.first, found.ends[-1], made, refusals), messages)


def _fields(batch: Batch, line: int, plan: Planned) -> dict[str, str | int]:
    """A record's own fields."""
    fields = record_fields(plan.task, plan.known) | dict(plan.more)
    fields["deadline"] = min(batch.deadline, int(fields.get("deadline", batch.deadline)))
    return fields | {"line": line}
