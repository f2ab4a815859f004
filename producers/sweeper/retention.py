"""Removes what nobody needs any more, so that nothing grows for ever. The leader does this.

    Stale         data without TTL that no process uses; dead letters; indexes' entries of tasks that are gone
    erase         what is left of deleted tasks outside the reach of DELETE
    remove_files  files whose end has come, and what dead processes left of files
    trim_outbox   webhooks that were delivered or given up; replies that nobody takes
    sum_usage     rows of the ledger become sums of hours and days; old days go

docs/how/sweeper.md lists all kinds, and the times for which each is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, WatchError

from producers.admin.dead_letters import letters, purge
from producers.backup.journal import Journal
from producers.client.aio import AsyncClient
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, aexecute, aexecute_many, arun, ms, parsed, seconds, text
from producers.contract import keys
from producers.store import files, task_index
from producers.store.blobs import Blobs
from producers.store.fleet import cards
from producers.store.fleet.routing import Routing
from producers.store.measurements import KEPT_S
from producers.store.outbox import Due, backlog, trim, untaken
from producers.store.protocol import swap
from producers.store.usage.ledger import BATCH_SIZE, fold, prune, roll

log = logging.getLogger(__name__)

#: Time (s) for which a dead letter is kept.
LETTERS_KEPT_S: Final = 14 * 24 * 3600.0
#: Time (s) since its last firing after which a schedule that nobody runs is forgotten: longer than a year.
SCHEDULE_KEPT_S: Final = 400 * 24 * 3600.0
#: Time (s) for which something must be unneeded before it is removed: far more than any process takes between two
#: calls, also a worker that is about to renew its lapsed lease.
UNNEEDED_S: Final = 60.0
#: Ids that are looked for at a time.
ERASE_PAGE: Final = 1000
#: Time (s) after its DELETE for which more of a task may turn up: some leases of a worker.
ERASE_LATE_S: Final = 60
#: Files that are looked up at a time, and removed at a time: a bucket takes its time for each.
FILES_PAGE: Final = 1000
FILES_AT_ONCE: Final = 16
#: Time (s) after which an upload that nobody has written to counts as dead: gateways cut off slow ones long before.
UPLOAD_S: Final = 3600.0
#: Time (s) for which delivered rows are kept, and the most of them: they are there to look at.
DELIVERED_KEPT_S: Final = 7 * 24 * 3600.0
DELIVERED_LIMIT: Final = 100_000
#: Time (s) for which dead rows are kept; they may be replayed until then, however many there are.
DEAD_KEPT_S: Final = 30 * 24 * 3600.0
DEAD_LIMIT: Final = 2**53
#: Time (s) for which a reply may be due, and nobody takes it, before it is dead.
UNTAKEN_S: Final = 30 * 24 * 3600.0
#: Time (s) for which a row may be due before the log says that nobody takes it.
OUTBOX_LATE_S: Final = 60.0
#: Rows removed in a call.
OUTBOX_PAGE: Final = 500
#: Age (s) at which a row becomes part of a sum of its hour, and such a sum part of its day's. Who asks for usage reads
#: the rows of all tenants that are younger.
FOLD_AFTER_S: Final = 60.0
ROLL_AFTER_S: Final = 48 * 3600.0
#: Time (s) for which a day is kept.
DAYS_KEPT_S: Final = 400 * 24 * 3600.0


@dataclass(slots=True)
class RemovedData:
    letters: int = 0
    incarnations: int = 0
    deliveries: int = 0
    files: int = 0
    listed: int = 0
    """Entries of the indexes of tasks whose records are gone."""
    schedules: int = 0


class Stale:
    """Removes unneeded data that has no TTL. Remembers since when something has not been needed: data that its owner
    may be about to use must be found unneeded twice."""

    def __init__(
        self, client: AsyncClient, *, letters_kept_s: float = LETTERS_KEPT_S, unneeded_s: float = UNNEEDED_S
    ) -> None:
        self._client = client
        self._store, self._broker = client.store, client.broker
        self._letters_kept_s = letters_kept_s
        self._unneeded_s = unneeded_s
        self._since: dict[str, float] = {}
        self._listed_to = task_index.TrimPosition()

    async def sweep(self) -> RemovedData:
        """Remove stale data once. Raises redis.exceptions.RedisError or OSError; then the waiting times begin again."""
        since, self._since = self._since, {}
        removed, kept = RemovedData(), dict[str, float]()
        await self._incarnations(removed, since, kept)
        await self._files(removed, since, kept)
        await self._letters(removed)
        await self._schedules(removed, since, kept)
        self._listed_to, removed.listed = await task_index.trim(self._store, self._listed_to)
        await self._broker.tidy()
        self._since = kept
        return removed

    async def _incarnations(self, removed: RemovedData, since: dict[str, float], kept: dict[str, float]) -> None:
        for worker in await self._broker.workers():
            name = worker.incarnation
            if worker.remaining_s is None and self._long(keys.lease(name), since, kept):
                count = await self._broker.reap(name)
                removed.incarnations += count >= 0
                removed.deliveries += max(count, 0)
                if count > 0:
                    log.warning("worker %s is gone: its %d deliveries are in the queue again", name, count)

    async def _files(self, removed: RemovedData, since: dict[str, float], kept: dict[str, float]) -> None:
        await self._versions()
        named = " ".join(map(text, await self._store.hvals(keys.MODELS) + await self._store.hvals(keys.VERSIONS)))
        async for sha256 in cards.file_names(self._store):
            if sha256 not in named and self._long(keys.blob(sha256), since, kept):
                removed.files += await cards.remove_unused_file(self._store, sha256)

    async def _versions(self) -> None:
        """Remove the cards of old versions that nothing serves or names."""
        versions = await self._store.hgetall(keys.VERSIONS)
        entries = [
            *map(parsed, await self._store.hvals(keys.POOLS)),
            *map(parsed, await self._store.hvals(keys.MODELS)),
        ]
        used = {(str(entry.get("model", entry.get("name"))), str(entry.get("version"))) for entry in entries}
        standing = {*map(text, await self._store.hkeys(keys.MODELS))}
        models = sorted({text(field).rpartition("@")[0] for field in versions})
        states = await aexecute_many(self._store, [("HGET", keys.routing(model), "now") for model in models])
        for model, state in zip(models, states, strict=True):
            if (routing := Routing.of(model, state)) is not None:
                used |= {(model, version) for version in routing.versions()}
        for call in cards.unused_versions(versions, used, standing):
            await arun(self._store, call)

    async def _letters(self, removed: RemovedData) -> None:
        before = await self._broker.now_ms() - int(self._letters_kept_s * 1000)
        old: list[Any] = []
        async for letter in letters(self._client):
            if letter.at_ms >= before:  # the oldest come first; an entry without a time is not ours
                break
            old += [letter] if letter.at_ms else []
        for letter in old:
            removed.letters += await purge(self._client, letter)

    async def _schedules(self, removed: RemovedData, since: dict[str, float], kept: dict[str, float]) -> None:
        """Remove schedules that nobody runs any more.

        The configurations are not known here, but a schedule that is run fires now and then, or has a leader.
        """
        before = seconds(await self._store.time()) - SCHEDULE_KEPT_S
        for name, fired in (await self._store.hgetall(keys.SCHEDULES)).items():
            leader = keys.source_leader(text(name))
            if int(fired) < before and not await self._store.exists(leader) and self._long(leader, since, kept):
                removed.schedules += await arun(self._store, swap(keys.SCHEDULES, text(name), text(fired), ""))

    def _long(self, name: str, since: dict[str, float], kept: dict[str, float]) -> bool:
        """Note that something is unneeded. Returns whether it has been for `unneeded_s`."""
        now = time.monotonic()
        kept[name] = since.get(name, now)
        return now - kept[name] >= self._unneeded_s


@dataclass(slots=True)
class Erased:
    letters: int = 0
    results: int = 0


async def erase(client: AsyncClient, journal: Journal | None = None) -> Erased:
    """Erase once what is left of deleted tasks, the earliest deleted first.

        DELETE: the id enters `penstock:erasing` ─▶ its dead letters and its Celery result go ─▶ it leaves, later

    Dead letters are the broker's, which may be another server. A worker or a sweeper that was about to store something
    of the task when it was deleted may do so a moment later; so an id stays for ERASE_LATE_S, and until it is in the
    journal. Raises redis.exceptions.RedisError or OSError.
    """
    done = Erased()
    if journal is not None:
        await journal.keep()
    now, page = await aexecute_many(
        client.store, [("TIME",), ("ZRANGE", keys.ERASING, 0, ERASE_PAGE - 1, "WITHSCORES")]
    )
    deleted = {text(task_id): int(float(at)) for task_id, at in zip(page[::2], page[1::2], strict=True)}
    if not deleted:
        return done
    done.results = sum(
        await aexecute_many(client.store, [("UNLINK", keys.celery_result(task_id)) for task_id in deleted])
    )
    for letter in [letter async for letter in letters(client) if letter.task_id in deleted]:
        done.letters += await purge(client, letter)
    if journal is None and await client.store.exists(keys.JOURNAL):
        warn_throttled(
            log, "%d ids of what was deleted stay: a journal was kept, and this sweeper has no --journal", len(deleted)
        )
        return done
    if over := [task_id for task_id, at in deleted.items() if at < ms(now) - ERASE_LATE_S * 1000]:
        await aexecute_many(client.store, [("ZREM", keys.ERASING, *over)])
    return done


@dataclass(slots=True)
class RemovedFiles:
    """Numbers of expired files, of contents without a file (`left`), and of unfinished uploads (`halves`)."""

    expired: int = 0
    left: int = 0
    halves: int = 0


async def remove_files(store: Redis, blobs: Blobs) -> RemovedFiles:
    """Remove files whose end has come, and what dead processes left of files (`producers.store.files`).

    Raises redis.exceptions.RedisError, and OSError if the folder cannot be reached.
    """
    removed = RemovedFiles()
    removed.expired = await _remove_all(files.expired, files.remove, store, blobs)
    removed.left = await _remove_all(files.left_behind, files.remove_left_behind, store, blobs)
    removed.halves = await asyncio.to_thread(blobs.clean, UPLOAD_S)
    return removed


async def _remove_all(
    find: Callable[[Redis, int], Awaitable[list[str]]],
    remove: Callable[[Redis, Blobs, str], Awaitable[bool]],
    store: Redis,
    blobs: Blobs,
) -> int:
    """Remove all that is found, a page at a time, some at once. Returns how many."""
    done, at_once = 0, asyncio.Semaphore(FILES_AT_ONCE)

    async def remove_one(name: str) -> bool:
        async with at_once:
            try:
                await remove(store, blobs, name)
            except (PermissionError, NotADirectoryError, IsADirectoryError) as error:  # others can be removed
                warn_throttled(log, "a file's content cannot be removed: %s", error)
                return False
            return True

    while names := await find(store, FILES_PAGE):
        removed = sum(await asyncio.gather(*map(remove_one, names)))
        done += removed
        if len(names) < FILES_PAGE or not removed:
            break
    return done


@dataclass(frozen=True, slots=True)
class Trimmed:
    delivered: int = 0
    dead: int = 0
    untaken: int = 0
    """Replies that are dead from now on, since nobody took them."""


async def count_outbox(store: Redis) -> None:
    """Add to `penstock:swept` the webhooks and replies that were delivered, or given up, since the last call of
    whomever: each once, since the mark moves in the same step. Raises redis.exceptions.RedisError or OSError."""
    mark = keys.metrics_mark("outbox")
    now = ms(await aexecute(store, "TIME")) - 1  # more of this millisecond may come
    async with store.pipeline(transaction=True) as pipe:
        await pipe.watch(mark)
        since = await pipe.get(mark)
        counts = {}
        if since is not None:
            for state, index in (("delivered", keys.WEBHOOKS_DELIVERED), ("dead", keys.WEBHOOKS_DEAD)):
                counts[state] = await pipe.zcount(index, f"({text(since)}", now)
        pipe.multi()
        pipe.set(mark, now, ex=KEPT_S)
        for state, count in counts.items():
            if count:
                pipe.hincrby(keys.SWEPT, f"webhooks_{state}", count)
        with suppress(WatchError, OutOfMemoryError):  # another sweeper has counted them; a full store counts later
            await pipe.execute()


async def trim_outbox(
    store: Redis,
    delivered_kept_s: float = DELIVERED_KEPT_S,
    dead_kept_s: float = DEAD_KEPT_S,
    untaken_s: float = UNTAKEN_S,
    late_s: float = OUTBOX_LATE_S,
) -> Trimmed:
    """Trim the outbox, and warn of webhooks and replies that nobody delivers.

    Rows that were delivered are kept for a while to be shown and replayed, dead ones for longer. Webhooks that are due
    are never removed: they wait for a `penstock webhooks` process. Replies wait for a process that runs their source,
    which may be gone for good: after a while they are dead. Raises redis.exceptions.RedisError or OSError.
    """
    now = await backlog(store)
    _report_late({source: due for source, due in now.due.items() if due.oldest_s > late_s})
    sources = [source for source in now.due if source is not None]
    given_up = sum([await _call_all(store, partial(untaken, source, untaken_s)) for source in sources])
    delivered = await _call_all(store, partial(trim, "delivered", delivered_kept_s, DELIVERED_LIMIT))
    dead = await _call_all(store, partial(trim, "dead", dead_kept_s, DEAD_LIMIT))
    return Trimmed(delivered, dead, given_up)


def _report_late(late: Mapping[str | None, Due]) -> None:
    if webhooks := late.get(None):
        warn_throttled(
            log,
            "%d webhooks are to be delivered, and one has been due for a while: start `penstock webhooks`, or more of"
            " them, if this is said again (due since %.0f s)",
            webhooks.rows,
            webhooks.oldest_s,
        )
    replies = [f"{due.rows} of {source}, due since {due.oldest_s:.0f} s" for source, due in late.items() if source]
    if replies:
        warn_throttled(
            log,
            "replies are to be sent, and nobody takes them: start `penstock sources` with these sources, or more of"
            " them, if this is said again (%s)",
            "; ".join(replies),
        )


async def _call_all(store: Redis, step: Callable[[int], Call]) -> int:
    """Call as long as there may be more. Returns how many rows there were."""
    total = 0
    while True:
        count = int(await arun(store, step(OUTBOX_PAGE)))
        total += count
        if count < OUTBOX_PAGE:
            return total


@dataclass(frozen=True, slots=True)
class Ages:
    """Times (s) after which rows, hours and days are taken."""

    fold: float = FOLD_AFTER_S
    roll: float = ROLL_AFTER_S
    kept: float = DAYS_KEPT_S


USUAL_AGES: Final = Ages()


async def sum_usage(client: AsyncClient, ages: Ages) -> int:
    """Add the ledger's old rows to sums of hours, and hours to days; remove old days. Returns how many rows.

    docs/how/deaths.md says what remains when it dies in between. Raises redis.exceptions.RedisError or
    OSError.
    """
    folded = 0
    while count := await arun(client.store, fold(int(ages.fold * 1000))):
        folded += count
        if count < BATCH_SIZE:
            break
    while await arun(client.store, roll(int(ages.roll))):
        pass
    await prune(client.store, ages.kept)
    return folded
