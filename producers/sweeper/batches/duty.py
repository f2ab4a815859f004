"""Takes all open batches forward.

    validating ─▶ check ─▶ in_progress: expand, write ─▶ finalizing: write ─▶ finish ─▶ tidy
                      └──▶ failed                          cancelling: cancel lines, write ─┘

What a step has to do is read from the batch, and each change is one script that checks it again. So any process may go
on with a batch, and two may at once. Each batch has steps of its own, so that a large one keeps no small one waiting.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

from producers.client.aio import AsyncClient
from producers.client.directory import listed
from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun
from producers.connection.trouble import sleep_unless_cancelled
from producers.contract import keys, levels
from producers.store import batches, files
from producers.store.batches import Batch
from producers.store.blobs import BlobNotFound, Blobs, Line, lines
from producers.store.fleet import adapters
from producers.sweeper.batches.endpoint import Endpoints
from producers.sweeper.batches.expand import BLOCK, WINDOW, Expander
from producers.sweeper.batches.input import BadLine, Reason, check
from producers.sweeper.batches.results import PART, Finisher, Writer, closing

log = logging.getLogger(__name__)

#: Time (s) between two looks at what is open.
EVERY_S: Final = 1.0
#: Most lines that one step expands.
STEP: Final = 8 * BLOCK
#: Time limit (s) of a step, for servers that accept connections but do not answer.
LIMIT_S: Final = 300.0
#: Time (s) after which the lines of a cancelled batch that have not ended are cancelled again.
CANCEL_EVERY_S: Final = 10.0
#: Steps at a time, which hold lines in memory; and inputs that are checked, or files that are joined, at a time. Half
#: of them may be of one tenant's batches, and tenants wait in turn: one with many batches does not hold up the others.
STEPS: Final = 4
LONG_STEPS: Final = 2


class Turns:
    """Places for steps, of which one tenant may have `of_a_tenant` at a time.

    A tenant's further steps wait for its own, and only `of_a_tenant` of them among those of all tenants, which get
    places in the order in which they came.
    """

    def __init__(self, places: int, of_a_tenant: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._of_a_tenant = of_a_tenant
        self._tenants: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        semaphore, users = self._tenants.setdefault(tenant, (asyncio.Semaphore(self._of_a_tenant), []))
        users.append(None)
        try:
            async with semaphore, self._places:
                yield
        finally:
            users.pop()
            if not users:
                del self._tenants[tenant]


class Batches:
    """The leader's part in all batches.

    `window`: most lines of a batch in the store; `max_lines`: of all batches of a tenant. `block`: lines made in one
    script. `part`: lines written at a time.
    """

    def __init__(
        self,
        client: AsyncClient,
        blobs: Blobs,
        endpoints: Endpoints,
        count: Callable[[dict[str, int]], Awaitable[None]],
        *,
        window: int = WINDOW,
        max_lines: int = batches.MAX_LINES,
        block: int = BLOCK,
        part: int = PART,
    ) -> None:
        self._store = client.store
        self._blobs = blobs
        self._count = count
        self._expander = Expander(client, blobs, endpoints, block=block, window=window, max_lines=max_lines)
        self._writer = Writer(client, blobs, endpoints, part=min(part, window))
        self._finisher = Finisher(client, blobs)
        self._steps, self._long_steps = Turns(STEPS, STEPS // 2), Turns(LONG_STEPS, LONG_STEPS // 2)
        self._cancelled: dict[str, float] = {}

    async def run(self, every_s: float = EVERY_S) -> None:
        """Take all open batches forward, until cancelled."""
        running: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                try:
                    for batch_id in await batches.open_batches(self._store):
                        if batch_id not in running:
                            task = running[batch_id] = asyncio.create_task(self._advance(batch_id), name=batch_id)
                            task.add_done_callback(lambda ended: running.pop(ended.get_name()))
                    await batches.trim(self._store, int(time.time() * 1000))
                except FAILURES as error:
                    warn_throttled(log, "cannot ask the store for batches, trying again: %s", error)
                await sleep_unless_cancelled(every_s)
        finally:
            steps = list(running.values())
            for task in steps:
                task.cancel()
            if steps:
                await asyncio.wait(steps)

    async def _advance(self, batch_id: str) -> None:
        """Take one batch as far as it goes now."""
        try:
            while done := await self._step(batch_id):
                await self._count(done)
        except FAILURES as error:
            warn_throttled(log, "batch %s is held up, trying again: %s", batch_id, error)
        except Exception:  # noqa: BLE001 - one batch must not stop the others
            warn_throttled(log, "a step of batch %s failed, trying again:\n%s", batch_id, traceback.format_exc())

    async def _step(self, batch_id: str) -> dict[str, int]:
        """The step that was done, by its name in `penstock:swept`; nothing if there is nothing to do for now."""
        batch = await batches.read(self._store, batch_id)
        if batch is None:
            await arun(self._store, batches.close(batch_id))
            return {}
        try:
            if batch.ended:
                await self._finisher.tidy(batch)
                self._cancelled.pop(batch_id, None)
                log.info("batch %s is %s", batch_id, batch.status)
                return {}
            if batch.status == "validating":
                return {} if _is_beyond(batch) else await self._validate(batch)
            return await self._go_on(batch)
        except BlobNotFound:
            text = f"The input {batch.input_file} is gone."
            if await files.get(self._store, batch.input_file) is not None:
                text = (
                    f"The content of the input {batch.input_file} is not in the sweeper's place of files (--files-dir)."
                )
                log.warning("batch %s fails: %s Sources, gateways and sweepers share one place", batch.id, text)
            return await self._fail(batch, [Reason("input_file_gone", text)])
        except BadLine as error:
            return await self._fail(batch, [Reason(error.code, f"The input has changed: {error}")])

    async def _validate(self, batch: Batch) -> dict[str, int]:
        stopped = threading.Event()

        def read() -> Iterator[Line]:
            return lines(self._blobs, batch.input_file)

        try:
            async with self._long_steps.turn(batch.tenant):
                if await files.get(self._store, batch.input_file) is None:
                    raise BlobNotFound(batch.input_file)
                names = listed(await self._store.hgetall(keys.MODELS))
                entries = await self._store.hgetall(keys.ADAPTERS)
                models = [name for name in (*names, *adapters.names(entries, names)) if batch.principal.may_use(name)]
                checked = await asyncio.to_thread(check, read, batch.endpoint, models, stop=stopped.is_set)
        finally:
            stopped.set()
        if checked.errors:
            return await self._fail(batch, checked.errors)
        await arun(self._store, batches.begin(batch.id, checked.lines))
        return {"batches_begun": 1}

    async def _fail(self, batch: Batch, reasons: Sequence[Reason]) -> dict[str, int]:
        await arun(self._store, batches.fail(batch.id, [asdict(reason) for reason in reasons]))
        return {"batches_ended": 1}

    async def _go_on(self, batch: Batch) -> dict[str, int]:
        done = {"batch_lines": 0, "batch_results": 0, "batches_ended": 0}
        async with self._steps.turn(batch.tenant), asyncio.timeout(LIMIT_S):
            if batch.status == "cancelling":
                await self._cancel_lines(batch)
            done["batch_results"] = await self._writer.write(batch)
            if batch.status == "in_progress" and not _is_beyond(batch):
                # Before more lines begin: whatever becomes of these, the batch ends at its deadline.
                await arun(self._store, batches.finalize(batch.id))
                done["batch_lines"] = await self._expander.expand(batch, STEP)
        if closing(batch):
            async with self._long_steps.turn(batch.tenant):
                done["batches_ended"] = int(await self._finisher.finish(batch) in batches.ENDED)
        return {counter: count for counter, count in done.items() if count}

    async def _cancel_lines(self, batch: Batch) -> None:
        """Now and then: the store may have lost a cancel in a failover."""
        now = time.monotonic()
        if now - self._cancelled.get(batch.id, -CANCEL_EVERY_S) >= CANCEL_EVERY_S:
            self._cancelled[batch.id] = now
            await self._finisher.cancel_lines(batch)


def _is_beyond(batch: Batch) -> bool:
    """Whether a later release took the batch: its lines may ask for what this one refuses. Its sweeper goes on."""
    return batch.count("level") > levels.LEVEL
