"""Runs the sweepers' duties: they finish what dead processes left.

    run   (gateways, and the leading sweeper): interrupted tasks, lost readers, deadlines, unsettled final tasks
    lead  (`penstock sweeper`, any number of them): acquire the lease -> run; and compact streams, store results of
          plain Celery tasks, return killed workers' messages, handle pools without workers and stale data;
          withdraw models that nobody serves; take batches forward (`producers.sweeper.batches`); judge rollouts
          (`producers.rollouts`)
          -> until the lease is lost
          All the while, leading or not, it hears Celery's `revoke` (`producers.sweeper.revocations`).

Each action is one script that checks the record itself. So any number of processes may act at once, and be stopped or
killed between any two calls. Actions are counted in `penstock:swept`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from redis.exceptions import NoPermissionError

from producers.admin.listing import UnservedModels
from producers.backup.journal import EVERY_S as JOURNAL_EVERY_S
from producers.backup.journal import Journal
from producers.broker.connect import control_url
from producers.client.aio import AsyncClient
from producers.client.leases import LEASE_S as LEADER_LEASE_S
from producers.client.leases import LapsedReaders, Leadership
from producers.client.steps import FAILURES, Steps
from producers.connection.local import FILES_DIR
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import aexecute_many, arun
from producers.connection.storage import PRESSED, read_storage
from producers.connection.trouble import error_text, sleep_unless_cancelled
from producers.contract import keys
from producers.contract.sealing import Keyring
from producers.errors import PenstockError
from producers.rollouts.controller import Controller
from producers.store import epoch, protocol
from producers.store.batches import MAX_LINES
from producers.store.blobs import open_blobs
from producers.store.measurements import count_ended
from producers.store.protocol import READER_LEASE_S
from producers.store.usage.ledger import add_overhead
from producers.sweeper import tasks
from producers.sweeper.batches.duty import EVERY_S as BATCHES_EVERY_S
from producers.sweeper.batches.duty import Batches
from producers.sweeper.batches.endpoint import Endpoints
from producers.sweeper.batches.expand import WINDOW
from producers.sweeper.celery_results import CeleryResults
from producers.sweeper.compact import AGE_MS, Offload, compact
from producers.sweeper.gen_ai import GenAiMetrics, MetricsExporter
from producers.sweeper.queues import (
    ORPHANED_AFTER_S,
    RETIRE_AFTER_S,
    UNSERVED_AFTER_S,
    OrphanedQueues,
    RetiredPools,
    UnservedTasks,
)
from producers.sweeper.retention import (
    DEAD_KEPT_S,
    DELIVERED_KEPT_S,
    LETTERS_KEPT_S,
    UNNEEDED_S,
    UNTAKEN_S,
    USUAL_AGES,
    Ages,
    Stale,
    count_outbox,
    erase,
    remove_files,
    sum_usage,
    trim_outbox,
)
from producers.sweeper.revocations import hear
from producers.sweeper.shadows import Shadows
from producers.sweeper.tasks import UNSETTLED_AGE_MS as ORPHAN_MS
from producers.sweeper.tasks import Orphans, advance_parents, expire_late
from producers.sweeper.traces import TaskTraces
from producers.tracing.export import Tracer

log = logging.getLogger(__name__)

#: Silence (s) of the store, beside the lease, after which a sweeper is not ready.
SILENT_S: Final = 10.0
#: Time (s) for which a sweep fails before the sweeper is not ready.
FAILING_S: Final = 60.0
#: Mean interval (s) between sweeps.
EVERY_S: Final = 10.0
#: Interval (s) at which the leader counts tasks that have ended, and looks whether the store is filling: then it
#: compacts at once what is settled.
PRESSED_EVERY_S: Final = 1.0
#: Workers' time without tasks enters the ledger as often (s).
OVERHEAD_EVERY_S: Final = 60.0
#: Interval (s) of the sweep for deadlines.
DEADLINES_EVERY_S: Final = 1.0
#: Interval (s) of the sweep for tasks in chunks.
PARENTS_EVERY_S: Final = 2.0
#: Interval (s) of the sweeps for pools without workers and for stale data.
SELDOM_S: Final = 60.0
#: Time limit (s) of a sweep, for servers that accept connections but do not answer.
LIMIT_S: Final = 60.0

Counts = dict[str, int]
Duty = Callable[[], Awaitable[Counts]]


class Condition:
    """A sweeper's condition, for the probes of whoever runs it: whether the store answers, and which sweeps fail.

    A sweeper is ready while it leads or stands by. It is not once the store has been silent, or one of its sweeps has
    failed each time, for longer than a server takes to restart. So a release whose sweeps fail stops its own rollout.
    No reason here ends the process: each sweep is tried again, and a new process would find the same. The event loop
    writes it, and another thread may read it.
    """

    given_up = ""

    def __init__(self) -> None:
        self.leadership: Leadership | None = None
        self.failing: dict[object, tuple[float, str]] = {}
        """Sweep -> when (monotonic) the first of its failures in a row came, and the last one's reason."""

    def succeeded(self, sweep: object) -> None:
        self.failing.pop(sweep, None)

    def failed(self, sweep: object, error: Exception) -> None:
        since, _ = self.failing.get(sweep, (time.monotonic(), ""))
        self.failing[sweep] = since, error_text(error)

    def unready(self) -> list[str]:
        """Reasons why it does not do its work now; empty while it leads or stands by."""
        now, leadership = time.monotonic(), self.leadership
        if leadership is None:
            return ["it has not begun"]
        if now - leadership.heard_at > SILENT_S + leadership.lease_s:
            return [leadership.fault]
        failing = [(now - since, reason) for since, reason in list(self.failing.values())]
        return [f"a sweep has failed for {age:.0f} s: {reason}" for age, reason in failing if age > FAILING_S]


@dataclass(frozen=True, slots=True)
class SweeperSettings:
    """Settings of a sweeper. Times are seconds."""

    broker: str
    store: str
    name: str = field(default_factory=lambda: f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}")
    lease: float = LEADER_LEASE_S
    every: float = EVERY_S
    seldom: float = SELDOM_S
    reader_lease: float = READER_LEASE_S
    """The gateways' reader lease."""
    unsent_after: float = protocol.SWEEP_AGE_MS / 1000
    """Time after which the message of a `submitting` record is sent (again)."""
    unsettled_after: float = ORPHAN_MS / 1000
    """Time after which a final, unsettled task is checked for a worker that will settle it."""
    compact_after: float = AGE_MS / 1000
    """Time between a task's settlement and its stream's compaction."""
    letters_kept: float = LETTERS_KEPT_S
    unneeded: float = UNNEEDED_S
    delivered_kept: float = DELIVERED_KEPT_S
    dead_kept: float = DEAD_KEPT_S
    """Times for which webhooks that were delivered, or given up, are kept."""
    untaken: float = UNTAKEN_S
    """Time after which replies are given up that no process of their source takes."""
    usage: Ages = USUAL_AGES
    """Ages at which the ledger's rows become sums of hours, these of days, and days are removed."""
    retire_after: float = RETIRE_AFTER_S
    files_dir: str = str(FILES_DIR)
    """The folder, or the bucket's URL, for files' content, which all gateways and sweepers share."""
    results_to_files: int | None = None
    """Least size (bytes) of a compacted stream that goes to `files_dir`; None: all stay in the store."""
    batch_lines: int = WINDOW
    """Most lines of one batch that are queued, or wait to be written, at a time."""
    tenant_lines: int = MAX_LINES
    """Most such lines of all batches of a tenant that has no limit of its own."""
    journal: str | None = None
    """The folder, or the bucket's URL, of the journal (`producers.backup.journal`); None: none is kept."""
    journal_keys: Keyring = field(default_factory=Keyring)
    """Keys that encrypt the journal; without a key it is plain."""
    orphaned_after: float = ORPHANED_AFTER_S
    """Time without any worker's lease after which a queue's messages return to its lists."""
    unserved_after: float = UNSERVED_AFTER_S
    """Time after which a task is ended that no worker's release can do, though workers of its version are up."""


async def run(
    client: AsyncClient,
    every_s: float = EVERY_S,
    reader_lease_s: float = READER_LEASE_S,
    waiting: Callable[[str], None] = lambda task_id: None,
    unsent_after_s: float = protocol.SWEEP_AGE_MS / 1000,
    unsettled_after_s: float = ORPHAN_MS / 1000,
    condition: Condition | None = None,
) -> None:
    """Sweep until cancelled.

    `reader_lease_s`: the gateways' reader lease. `waiting`: see `producers.sweeper.tasks`. Both times after it: see
    `SweeperSettings`. `condition`: gets the sweeps that fail.
    """
    readers, orphans = LapsedReaders(reader_lease_s), Orphans(int(unsettled_after_s * 1000), waiting=waiting)

    async def submitting() -> Counts:
        swept = await tasks.send_unsent(client, int(unsent_after_s * 1000))
        return {"sent": swept.sent, "unsent": swept.failed}

    async with asyncio.TaskGroup() as group:
        group.create_task(_repeat(client, submitting, every_s, condition))
        for counter, sweep, often_s in (
            ("unread", readers.sweep, readers.every_s),
            ("expired", expire_late, DEADLINES_EVERY_S),
            ("parents", advance_parents, PARENTS_EVERY_S),
            ("settled", orphans.sweep, every_s),
        ):
            group.create_task(_repeat(client, partial(_steps, client, counter, sweep), often_s, condition))


async def lead(
    client: AsyncClient,
    settings: SweeperSettings,
    endpoints: Endpoints | None = None,
    condition: Condition | None = None,
    tracer: Tracer | None = None,
    exporter: MetricsExporter | None = None,
) -> None:
    """Sweep whenever this process leads, until cancelled; then give the lead up at once. Raises EpochChanged, and
    ForeignWorkers.

    `endpoints`: those that batches are for; without them, batches are left to another sweeper. `condition`: is kept up
    to date. `tracer`: tasks' spans are sent by it; None: traces are off. `exporter`: sends metrics to a
    collector; None: that is off.
    """
    leadership = Leadership(client, settings.name, settings.lease)
    condition = condition or Condition()
    condition.leadership = leadership
    traces = None if tracer is None else TaskTraces(client, tracer)
    gen_ai = None if exporter is None else GenAiMetrics(client, exporter)

    async def duties() -> None:
        await _check_workers(client, settings.lease)
        log.info("%s leads: it sweeps", settings.name)
        condition.failing.clear()
        try:
            await _duties(client, settings, endpoints, condition, traces, gen_ai)
        finally:
            condition.failing.clear()

    hearing = asyncio.create_task(hear(client, control_url(settings.broker, settings.store)), name="hear revocations")
    try:
        await leadership.during(duties)
    finally:
        hearing.cancel()
        await asyncio.wait((hearing,))
        for sender in (traces, gen_ai):
            if sender is not None:
                sender.close()


class ForeignWorkers(PenstockError):
    """Workers of another system hold leases at the broker of a restored one."""


async def _check_workers(client: AsyncClient, pause_s: float) -> None:
    """Raises ForeignWorkers where workers hold leases at the broker of a restored system, and none at its store.

    What they still need would be swept, and they would take this system's tasks. A worker takes its lease at the store
    first; whoever lacks it twice is another system's.
    """
    if client.one_server or not await epoch.aread(client.store):
        return
    foreign: set[str] | None = None
    for _ in range(2):
        living = [worker.incarnation for worker in await client.broker.workers() if worker.remaining_s is not None]
        leases = await aexecute_many(client.store, [("EXISTS", keys.lease(name)) for name in living])
        without = {name for name, there in zip(living, leases, strict=True) if not there}
        foreign = without if foreign is None else foreign & without
        if not foreign:
            return
        await asyncio.sleep(pause_s)
    raise ForeignWorkers(
        f"workers that have no lease at this store hold leases at its broker: {', '.join(sorted(foreign or ()))}. This "
        "store was restored from a backup: stop the old system's workers first (docs/run/backup.md)"
    )


async def _duties(
    client: AsyncClient,
    settings: SweeperSettings,
    endpoints: Endpoints | None,
    condition: Condition,
    traces: TaskTraces | None,
    gen_ai: GenAiMetrics | None,
) -> None:
    results = CeleryResults(client, settings.store)
    pools = RetiredPools(client, settings.retire_after)
    orphaned = OrphanedQueues(client, settings.orphaned_after)
    undone = UnservedTasks(client, results, settings.unserved_after)
    models = UnservedModels(client)
    blobs = open_blobs(settings.files_dir)
    offload = None if settings.results_to_files is None else Offload(blobs, settings.results_to_files)
    journal = None
    if settings.journal is not None:
        journal = Journal(client.store, open_blobs(settings.journal), settings.journal_keys)
    stale = Stale(client, letters_kept_s=settings.letters_kept, unneeded_s=settings.unneeded)
    judged = Controller(client, settings.store)

    async def pack(age_s: float = settings.compact_after) -> Counts:
        done = await compact(client, int(age_s * 1000), offload)
        counts = {"compacted": done.streams, "compacted_entries": done.entries, "compacted_bytes": done.size}
        return counts | {"results_moved": done.moved}

    async def pack_at_once() -> Counts:
        storage = await read_storage(client.store)
        return await pack(0.0) if storage.ratio >= PRESSED else {}

    async def returned() -> Counts:
        reaped, recalled = await orphaned.sweep()
        return {"returned": reaped, "recalled": recalled}

    async def trim() -> Counts:
        done = await trim_outbox(client.store, settings.delivered_kept, settings.dead_kept, settings.untaken)
        return {"removed_webhooks": done.delivered + done.dead, "untaken_replies": done.untaken}

    async def count_ended_webhooks() -> Counts:
        try:
            await count_outbox(client.store)
        except NoPermissionError as error:  # users of the server as an earlier release made them
            warn_throttled(log, "Webhooks that end are not in the metrics, make the users' file anew: %s", error)
        return {}

    async def end_unserved() -> Counts:
        return {"unserved": await undone.sweep()}

    async def store_celery_results() -> Counts:
        return {"told": await results.store_waiting()}

    async def measure_ended() -> Counts:
        try:
            await count_ended(client.store)
        except NoPermissionError as error:  # users of the server as an earlier release made them
            warn_throttled(log, "Tasks that end are not in the metrics, make the users' file anew: %s", error)
        return {}

    async def judge_rollouts() -> Counts:
        try:
            return await judged.sweep()
        except NoPermissionError as error:  # users of the server as an earlier release made them
            warn_throttled(log, "Rollouts that judge stand still, make the users' file anew: %s", error)
        return {}

    async def count_overhead() -> Counts:
        try:
            return {"overhead_rows": await add_overhead(client.store)}
        except NoPermissionError as error:
            warn_throttled(log, "Workers' idle time is not in usage, make the users' file anew: %s", error)
            return {}

    async def add_up() -> Counts:
        if journal is not None:
            await journal.keep()  # what is folded must be there
        return {"ledger_rows": await sum_usage(client, settings.usage)}

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        stack.callback(judged.close)
        basics = run(
            client,
            settings.every,
            settings.reader_lease,
            results.wait,
            settings.unsent_after,
            settings.unsettled_after,
            condition,
        )
        group.create_task(basics)
        if endpoints is not None:
            windows = {"window": settings.batch_lines, "max_lines": settings.tenant_lines}
            batches = Batches(client, blobs, endpoints, partial(_count, client), **windows)
            group.create_task(batches.run(min(BATCHES_EVERY_S, settings.every)))
        often: tuple[Duty, ...] = (
            store_celery_results,
            pack,
            returned,
            end_unserved,
            models.sweep,
            add_up,
            count_ended_webhooks,
        )
        expired_files = partial(_named, "files", partial(remove_files, client.store, blobs))
        removals = (partial(_named, "removed", pools.sweep), partial(_named, "removed", stale.sweep))
        deleted = partial(_named, "erased", partial(erase, client, journal))
        if journal is not None:
            group.create_task(_repeat(client, partial(_kept, journal), min(JOURNAL_EVERY_S, settings.every)))
        seldom: tuple[Duty, ...] = (*removals, trim, expired_files, deleted)
        each_second: tuple[Duty, ...] = (pack_at_once, measure_ended, judge_rollouts, Shadows(client).sweep)
        if traces is not None:
            each_second += (traces.sweep,)
        if gen_ai is not None:
            group.create_task(_repeat(client, gen_ai.sweep, gen_ai.every_s, condition))
        for duties, every_s in (
            ((count_overhead,), OVERHEAD_EVERY_S),
            (often, settings.every),
            (seldom, settings.seldom),
            (each_second, min(PRESSED_EVERY_S, settings.every)),
        ):
            for duty in duties:
                group.create_task(_repeat(client, duty, every_s, condition))


async def _kept(journal: Journal) -> Counts:
    return {"journaled": await journal.keep()}


async def _steps(client: AsyncClient, counter: str, sweep: Callable[[], Steps[int]]) -> Counts:
    return {counter: await client.run(sweep())}


async def _named(prefix: str, sweep: Callable[[], Awaitable[Any]]) -> Counts:
    """A sweep's counts, each by its own name."""
    return {f"{prefix}_{name}": count for name, count in asdict(await sweep()).items()}


async def _repeat(client: AsyncClient, work: Duty, every_s: float, condition: Condition | None = None) -> None:
    condition = condition or Condition()
    while True:
        try:
            async with asyncio.timeout(LIMIT_S):
                done = {counter: count for counter, count in (await work()).items() if count}
                if done:
                    log.info("swept: %s", ", ".join(f"{count} {counter}" for counter, count in done.items()))
                    await _count(client, done)
            condition.succeeded(work)
        except FAILURES as error:
            condition.failed(work, error)
            warn_throttled(log, "sweep broken off, trying again: %s", error)
        except Exception as error:  # one bad record must not stop the sweeps for all others
            condition.failed(work, error)
            log.exception("a sweep failed, going on")
        apart = random.uniform(0.8, 1.2)  # noqa: S311 - keeps several sweepers apart
        await sleep_unless_cancelled(every_s * apart)


async def _count(client: AsyncClient, done: Counts) -> None:
    await arun(client.store, protocol.count(done))
