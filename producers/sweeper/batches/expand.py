"""Makes a task of each line of a batch, a block at a time.

    input from the cursor on ─▶ bodies ─▶ tasks or refusals ─▶ BATCH_EXPAND: records, refusals and cursor in one script
                                                          ─▶ messages ─▶ QUEUED

Killed after BATCH_EXPAND, the records stay `submitting`, and `producers.sweeper.tasks` sends their messages.

Lines of a key or tenant with limits are charged in that script, as ADMIT charges a task. A line that their budget has
not enough left for is refused; any other limit keeps lines off, and the next look goes on with them. So does a store
that is filling: lines are never refused for want of room. Lines that are
refused after work count in a minute's requests, as those of callers who wait.

Only so many lines are in the store at a time that no input fills its memory: a line's record has its prompt, and stays
until its result is written. The next lines follow when results were written (`producers.sweeper.batches.results`). That
holds for each batch, and for all of a tenant's together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.submission import prefix_of, record_fields
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.connection.storage import PRESSED, read_storage
from producers.contract.message import Message
from producers.contract.record import trace_fields
from producers.store import batches
from producers.store.access import tenants
from producers.store.batches import Batch, Block, Entry
from producers.store.blobs import Ahead, Blobs
from producers.store.usage.prices import Prices
from producers.store.waiting import promised
from producers.sweeper.batches.endpoint import Answer, Endpoints, PlannedTask
from producers.sweeper.batches.input import Requests, read_requests

log = logging.getLogger(__name__)

#: Most lines in a block, and their bytes; one longer line is a block, too. A block keeps the store busy for some 5 ms.
BLOCK: Final = 250
BLOCK_BYTES: Final = 1 << 20
#: Most lines of a batch in the store, and their bytes in the input. Workers take thousands of lines a second at most.
WINDOW: Final = 20_000
WINDOW_BYTES: Final = 64 << 20
#: Time (s) after which a step begins no further block: lines with forms may take seconds each, and others wait.
EXPAND_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Ready:
    """A block to be made, and the messages of its lines, by their numbers. `worked`: the numbers of those that are
    refused after work."""

    block: Block
    messages: Mapping[int, Message]
    worked: Sequence[int]


class Expander:
    """Expands batches. `window`: most lines of a batch in the store; `max_lines`: of all batches of a tenant that has
    no limit of its own."""

    def __init__(
        self,
        client: AsyncClient,
        blobs: Blobs,
        endpoints: Endpoints,
        *,
        block: int = BLOCK,
        window: int = WINDOW,
        max_lines: int = batches.MAX_LINES,
    ) -> None:
        self._max_lines = max_lines
        self._client = client
        self._blobs = blobs
        self._ahead = Ahead()
        self._endpoints = endpoints
        self._block = block
        self._window = window

    async def expand(self, batch: Batch, limit: int) -> int:
        """Expand up to `limit` lines. Returns their number; 0 if there is nothing to expand, or no room.

        While one block is written to the servers, the next one is made ready. Raises redis.exceptions.RedisError,
        OSError, BlobNotFound and BadLine.
        """
        line, offset, done = batch.count("line"), batch.count("offset"), 0
        if line == batch.total:
            return 0
        tenant_limit = await self._tenant_limit(batch.tenant)
        lines, size, results = await batches.lines_of(self._client.store, batch.tenant)
        full = size >= batches.MAX_BYTES or results >= batches.MAX_RESULT_BYTES
        if lines >= tenant_limit or full:  # else a block would be made ready for nothing
            return 0
        storage = await read_storage(self._client.store)
        if storage.limit and storage.used + await promised(self._client.store) >= PRESSED * storage.limit:
            warn_throttled(log, "batches pause until the store has room: %s", f"{storage.ratio:.0%} of it is in use")
            return 0
        over = time.monotonic() + EXPAND_S
        coming = self._begin(batch, line, offset)
        while coming is not None and done < limit:
            try:
                ready = await coming
            finally:
                coming.cancel()
            if not ready.block.entries:  # a minute's requests are used up
                break
            line, offset = line + len(ready.block.entries), ready.block.entries[-1].offset
            goes_on = done + len(ready.block.entries) < limit and time.monotonic() < over
            coming = self._begin(batch, line, offset) if goes_on else None
            try:
                created = await self._make(batch, ready, tenant_limit)
            except BaseException:
                if coming is not None:
                    coming.cancel()
                raise
            done += created
            if worked := sum(number < ready.block.first + created for number in ready.worked):
                await self._endpoints.charge_refused(worked, batch.principal, batch.tenant or None)
            if created < len(
                ready.block.entries
            ):  # a limit keeps lines off; or another sweeper leads by now; or an end
                break
        if coming is not None:
            coming.cancel()
        return done

    async def _tenant_limit(self, tenant: str) -> int:
        """The most lines of a tenant's batches in the store."""
        limits = await tenants.get(self._client.store, tenant)
        return self._max_lines if limits.max_lines is None else limits.max_lines

    def _begin(self, batch: Batch, line: int, offset: int) -> asyncio.Task[_Ready] | None:
        """Make the next block ready, in the background. None if there is none, or no room for it."""
        limit = min(self._block, (batch.total or 0) - line, self._window - (line - batch.count("written")))
        size = min(BLOCK_BYTES, WINDOW_BYTES - (offset - batch.count("written_offset")))
        if limit <= 0 or size <= 0:
            return None
        return asyncio.create_task(self._ready(batch, line, offset, limit, size))

    async def _ready(self, batch: Batch, line: int, offset: int, limit: int, size: int) -> _Ready:
        page = await asyncio.to_thread(read_requests, self._blobs, batch, line, offset, limit, size, self._ahead)
        bodies = [request.body for request in page.requests]
        kept = batch.fields.get("prices")
        prices = None if kept is None else Prices.parse(kept)
        tenant = batch.tenant or None
        planned = await self._endpoints.tasks(batch.endpoint, bodies, batch.principal, tenant, prices, batch.id)
        return await asyncio.to_thread(_block, batch, page, planned, self._endpoints.spent.to_json())

    async def _make(self, batch: Batch, ready: _Ready, max_lines: int) -> int:
        """Make a block's lines, as many as its accounts and its tenant's room allow. Returns how many are done."""
        answer = await arun(self._client.store, batches.expand(batch.id, ready.block, _shared(batch), max_lines))
        if not answer:
            return 0
        _, done, *spent = map(int, answer)
        first = ready.block.first
        messages = [message for line, message in ready.messages.items() if line < first + done and line not in spent]
        await self._client.broker.send_many(messages)
        if messages:
            await arun(self._client.store, batches.queued([message.id for message in messages]))
        return done


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


def _block(batch: Batch, page: Requests, planned: Sequence[PlannedTask | Answer], spent: str) -> _Ready:
    entries: list[Entry] = []
    messages: dict[int, Message] = {}
    worked: list[int] = []
    accounts: Sequence[str] = ()
    for line, (plan, behind) in enumerate(zip(planned, page.ends, strict=False), page.first):
        if isinstance(plan, Answer):
            entries.append(Entry(behind, error=plan.to_json()))
            if plan.worked:
                worked.append(line)
            continue
        task, name, fields, charge = plan.task, batches.task_id(batch.id, line), _fields(batch, line, plan), ""
        tokens, at = int(fields["tokens"]), plan.resolved_model.now_ms()
        if plan.charge is not None:
            accounts, charge = plan.charge.names, plan.charge.request_json(task, plan.resolved_model.card, tokens)
        entries.append(Entry(behind, name, fields, charge))
        prefix = prefix_of(task, plan.resolved_model.card)
        queue, size = str(fields["queue"]), (task.width, tokens)
        messages[line] = Message(name, queue, task.tier, *size, batch.tenant, at, prefix=prefix)
    return _Ready(Block(page.first, entries, accounts, spent), messages, worked)


def _fields(batch: Batch, line: int, plan: PlannedTask) -> dict[str, str | int]:
    """A record's own fields."""
    fields = record_fields(plan.task, plan.resolved_model) | dict(plan.more)
    fields["deadline"] = min(batch.deadline, int(fields.get("deadline", batch.deadline)))
    return fields | {"line": line}
