"""Copies a running system into an archive. It only reads, and goes on where an earlier run stopped.

    usage ─▶ Idempotency-Keys ─▶ tasks ─▶ batches ─▶ files ─▶ webhooks ─▶ keys and all else ─▶ the broker's ─▶ manifest

Nothing is read at one moment but what belongs together (a task; a batch): a restore finds the rest of the indexes and
counts by itself. The order lets it do so. What ends a task writes its row of the ledger, and during the backup those
rows are followed: each ended task has its row, as a row or in a sum. A task's chunks are read after it, also where they
were before, so that what its stream names has ended. A batch is read after its lines, so that lines
that are missing are known by its cursor; files after batches, so that a batch's files are there; an event's row after
its task, so that no task has ended whose event is missing; keys last, so that what is revoked meanwhile is revoked.

A blob is copied before the line that names it. One that is gone by then was deleted, or moved on: what named it is read
again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis.exceptions import WatchError

from producers.backup.archive import MANIFEST, PROGRESS, Archive, Entry, Manifest, encode, line
from producers.client.aio import AsyncClient
from producers.connection.connect import shown
from producers.connection.script import ms, parsed, text
from producers.contract import keys, levels
from producers.contract.keys import version_queue_of
from producers.errors import PenstockError
from producers.release import release
from producers.store import epoch
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.chunks import MAX_CHUNKS, chunk_id
from producers.store.references import Reference

log = logging.getLogger(__name__)

#: Bytes of lines, before they are compressed, from which on a segment is written.
SEGMENT: Final = 16 << 20
#: Names that one SCAN looks at, and tasks that are read at one moment.
SCAN: Final = 500
TASKS: Final = 25
#: Time (s) between two looks at the ledger: rows stay in it for a minute (`producers.sweeper.retention`).
FOLLOW_S: Final = 5.0
#: Entries of a stream, and rows of the ledger, that are read at a time.
PAGE: Final = 1000
#: Tries to read sums between two changes of a sweeper, and a batch whose parts are removed meanwhile.
TRIES: Final = 50
#: Keys that are copied whole, in this order.
NAMES: Final = (
    keys.REVOKED,
    *(keys.MODELS, keys.VERSIONS, keys.ADAPTERS, keys.ROUTES, keys.POOLS, keys.PROFILES, keys.ROLLOUTS),
    keys.CANARIES,
    *(keys.SCHEDULES, "penstock:sqs:queues"),
    *(
        keys.AUDIT,
        keys.AUDIT_ENDPOINTS,
        keys.WEBHOOK_SECRETS,
        keys.WEBHOOK_ENDPOINTS,
        keys.TENANT_LIMITS,
        keys.API_KEYS,
    ),
)
#: Patterns of further keys that are copied whole.
PATTERNS: Final = (
    *("penstock:blob:*", "penstock:adapter:*", "penstock:inbox:*", "celery-task-meta-*", "penstock:idempotent:*"),
    *("penstock:limits:*", "penstock:erased:*", "penstock:routing:*"),
)
#: Beginnings of names that match a pattern and are left out.
NOT: Final = ("penstock:inbox:lease:",)
_ROW: Final = "penstock:webhooks:row:"


class NotTaken(PenstockError):
    """No backup was made; the message says why."""


@dataclass(slots=True)
class Backup:
    """One run. `files`: the system's blobs. `each`: called now and then with what is done so far."""

    client: AsyncClient
    archive: Archive
    files: Blobs
    store_url: str
    broker_url: str
    each: Callable[[Manifest], None] = lambda manifest: None
    _manifest: Manifest = field(init=False)
    _lines: list[bytes] = field(init=False, default_factory=list)
    _size: int = field(init=False, default=0)
    _counts: dict[str, int] = field(init=False, default_factory=dict)
    _followed: float = field(init=False, default=0.0)

    async def run(self) -> Manifest:
        """Make the backup, or end one that was begun there. Raises NotTaken, Damaged, redis errors and OSError."""
        self._manifest = await self._begin()
        self._manifest.run = secrets.token_hex(8)
        await asyncio.to_thread(self.archive.save, PROGRESS, self._manifest)
        stages = self._stages()
        for number in range(self._manifest.stage, len(stages)):
            await stages[number]()
            await self._done(number + 1, 0)
        self._manifest.ended = await self._now()
        await asyncio.to_thread(self.archive.save, MANIFEST, self._manifest)
        await asyncio.to_thread(self.archive.forget_progress)
        return self._manifest

    def _stages(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return (
            self._usage,
            lambda: self._scan("penstock:idempotency:*", self._whole),
            lambda: self._scan("penstock:task:*", self._tasks),
            lambda: self._scan("penstock:batch:*", self._batches),
            lambda: self._scan("penstock:file:*", self._files),
            lambda: self._scan(f"{_ROW}*", self._rows),
            *(self._scanned(pattern) for pattern in PATTERNS),
            lambda: self._keep_whole(NAMES),
            self._follow_now,
            self._brokers,
        )

    def _scanned(self, pattern: str) -> Callable[[], Awaitable[None]]:
        return lambda: self._scan(pattern, self._whole)

    # ---- progress -------------------------------------------------------------------------------------------------

    async def _begin(self) -> Manifest:
        """The manifest of an unfinished earlier run, or of a new backup. Raises NotTaken."""
        if await asyncio.to_thread(self.archive.look, MANIFEST) is not None:
            raise NotTaken(f"{self.archive.location} has a whole backup already: name another place")
        now_epoch = await epoch.aread(self.client.store)
        begun = await asyncio.to_thread(self.archive.look, PROGRESS)
        if begun is None:
            return Manifest(
                secrets.token_hex(8),
                await self._now(),
                shown(self.store_url),
                shown(self.broker_url),
                release(),
                now_epoch,
            )
        if (begun.store, begun.epoch) != (shown(self.store_url), now_epoch):
            raise NotTaken(
                f"{self.archive.location} has an unfinished backup of {begun.store}, or of a time before a restore: "
                "name another place, or remove it"
            )
        log.info("going on with a backup that was begun, at stage %d", begun.stage)
        return begun

    async def _done(self, stage: int, cursor: int) -> None:
        """Write what was read up to here, and note that: a later run goes on behind it.

        Raises NotTaken where a later run does so already.
        """
        manifest = self._manifest
        now = await asyncio.to_thread(self.archive.look, PROGRESS)
        if now is None or now.run != manifest.run:
            raise NotTaken(f"another `penstock backup` writes to {self.archive.location}")
        if self._lines:
            lines, name = self._lines, f"segment-{len(manifest.segments) + 1:06d}"
            manifest.segments.append(await asyncio.to_thread(self.archive.put, name, lines))
            for kind, count in self._counts.items():
                manifest.counts[kind] = manifest.counts.get(kind, 0) + count
            self._lines, self._size, self._counts = [], 0, {}
        manifest.stage, manifest.cursor = stage, cursor
        await asyncio.to_thread(self.archive.save, PROGRESS, manifest)
        self.each(manifest)

    def _put(self, kind: str, entry: Entry) -> None:
        data = line({"kind": kind, **entry})
        self._lines.append(data)
        self._size += len(data)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    async def _scan(self, pattern: str, take: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Take all keys of a pattern. A key that is there all the time is taken; some may be taken twice."""
        store, cursor = self.client.store, self._manifest.cursor
        while True:
            cursor, page = await store.scan(cursor, match=pattern, count=SCAN)
            names = [text(name) for name in page if not text(name).startswith(NOT)]
            if names:
                await take(names)
            await self._follow()
            if cursor == 0:
                return
            if self._size > SEGMENT:
                await self._done(self._manifest.stage, int(cursor))

    async def _now(self) -> int:
        return ms(await self.client.store.time())

    # ---- usage ----------------------------------------------------------------------------------------------------

    async def _usage(self) -> None:
        """The sums, and the rows that are not in them: at one moment, for FOLD and ROLL move between the two."""
        store = self.client.store
        for _ in range(TRIES):
            indexes = [keys.USAGE_FOLDED, keys.USAGE, keys.USAGE_UNSPLIT]
            async with store.pipeline(transaction=True) as watching:
                await watching.watch(*indexes)
                names = [*indexes, *await self._sums()]
                await watching.watch(*names)
                entries = [entry async for entry in self._read(names)]
                rows = [row async for row in self._ledger("-")]
                watching.multi()
                watching.get(keys.USAGE_FOLDED)
                try:
                    await watching.execute()
                except WatchError:
                    continue
            for entry in entries:
                self._put("key", entry)
            self._keep_rows(rows)
            folded = next((entry["value"] for entry in entries if entry["name"] == keys.USAGE_FOLDED), "0-0")
            self._manifest.ledger = self._manifest.ledger or folded
            self._followed = time.monotonic()
            return
        raise NotTaken(f"the sums of usage changed {TRIES} times while they were read: try again")

    async def _sums(self) -> list[str]:
        """The keys of the sums of hours and days."""
        store = self.client.store
        buckets = [text(raw) for raw in await store.zrange(keys.USAGE, 0, -1)]
        names = [keys.usage_unsplit(text(raw)) for raw in await store.zrange(keys.USAGE_UNSPLIT, 0, -1)]
        for page in _pages(buckets, PAGE):
            async with store.pipeline(transaction=False) as pipe:
                for bucket in page:
                    pipe.smembers(keys.usage_tenants(bucket))
                whose = await pipe.execute()
            for bucket, tenants in zip(page, whose, strict=True):
                names += [keys.usage_tenants(bucket), *(keys.usage(bucket, text(tenant)) for tenant in tenants)]
        return names

    async def _ledger(self, first: str) -> AsyncIterator[tuple[str, Mapping[bytes, bytes]]]:
        while page := await self._page(keys.LEDGER, first):
            for row, fields in page:
                yield text(row), fields
            first = f"({text(page[-1][0])}"

    def _keep_rows(self, rows: Iterable[tuple[str, Mapping[bytes, bytes]]]) -> None:
        for row, fields in rows:
            self._put("usage", {"id": row, "fields": encode(fields)})
            self._manifest.ledger = row

    async def _follow(self) -> None:
        """The rows of tasks that ended meanwhile, before a sweeper adds them to sums."""
        if time.monotonic() - self._followed >= FOLLOW_S:
            await self._follow_now()

    async def _follow_now(self) -> None:
        last = self._manifest.ledger or "0-0"
        rows = [row async for row in self._ledger(f"({last}")]
        folded = text(await self.client.store.get(keys.USAGE_FOLDED) or b"0-0")
        if _id(folded) > _id(last) and (not rows or _id(rows[0][0]) > _id(folded)):
            note = "rows of the ledger were added to sums before they were read: some usage needs the journal"
            if note not in self._manifest.notes:
                self._manifest.notes.append(note)
        self._keep_rows(rows)
        self._followed = time.monotonic()

    # ---- what is read together ------------------------------------------------------------------------------------

    async def _tasks(self, names: Sequence[str]) -> None:
        prefix = keys.task("")
        await self._keep_tasks([name.removeprefix(prefix) for name in names])

    async def _keep_tasks(self, ids: Sequence[str]) -> None:
        for page in _pages(ids, TASKS):
            chunks: list[str] = []
            for entry in await self._read_tasks(page):
                chunks += _chunks(entry)
                while (moved := _moved(entry)) is not None and not await self._copied(moved.name):
                    again = await self._read_tasks([entry["id"]])
                    if not again:
                        break
                    if _moved(again[0]) == moved:
                        self._missing(f"the result of the task {entry['id']}")
                        self._put("task", entry)
                        break
                    entry = again[0]
                else:
                    self._put("task", entry)
            for some in _pages(chunks, TASKS):
                await self._keep_tasks(some)
                if self._size > SEGMENT:  # a later run reads this page of names again
                    await self._done(self._manifest.stage, self._manifest.cursor)

    async def _read_tasks(self, ids: Sequence[str]) -> list[Entry]:
        """The existing tasks among these, all read at one moment."""
        store = self.client.store
        async with store.pipeline(transaction=True) as pipe:
            pipe.time()
            for task_id in ids:
                pipe.hgetall(keys.task(task_id))
                pipe.pttl(keys.task(task_id))
                pipe.xrange(keys.stream(task_id))
                pipe.hgetall(keys.result(task_id))
            now, *answers = await pipe.execute(raise_on_error=False)
        entries = []
        for k, task_id in enumerate(ids):
            record, ttl, stream, result = answers[4 * k : 4 * k + 4]
            if broken := next((value for value in (record, stream, result) if isinstance(value, Exception)), None):
                self._missing(f"the task {task_id} ({broken})")
                continue
            if not record:
                continue
            entry = {
                "id": task_id,
                "at": ms(now),
                **_ttl(ttl),
                "record": encode(record),
                "stream": [
                    [text(at), [part for item in fields.items() for part in encode(list(item))]]
                    for at, fields in stream
                ],
                "result": encode(result),
            }
            if name := record.get(b"idempotency"):
                entry["entry"] = await self._read_key(text(name))
            entries.append(entry)
        return entries

    async def _batches(self, names: Sequence[str]) -> None:
        """Batches, each with the parts that it names."""
        prefix = keys.batch("")
        for batch_id in (name.removeprefix(prefix) for name in names):
            if ":" in batch_id:  # what belongs to a batch is read with it
                continue
            for _ in range(TRIES):
                entry = await self._read_batch(batch_id)
                if entry is None:
                    break
                parts = [part["name"] for some in entry["parts"].values() for part in parsed_list(some)]
                if all([await self._copied(part) for part in parts]):
                    self._put("batch", entry)
                    break
            else:
                self._missing(f"the batch {batch_id}, whose parts are not there")

    async def _read_batch(self, batch_id: str) -> Entry | None:
        async with self.client.store.pipeline(transaction=True) as pipe:
            pipe.time()
            pipe.hgetall(keys.batch(batch_id))
            pipe.pttl(keys.batch(batch_id))
            pipe.hgetall(keys.batch_refused(batch_id))
            pipe.hgetall(keys.batch_parts(batch_id))
            pipe.smembers(keys.batch_begun(batch_id))
            now, batch, ttl, refused, parts, begun = await pipe.execute()
        if not batch:
            return None
        fields = {"batch": batch, "refused": refused, "parts": parts, "begun": begun}
        return {"id": batch_id, "at": ms(now), **_ttl(ttl), **{name: encode(value) for name, value in fields.items()}}

    async def _files(self, names: Sequence[str]) -> None:
        prefix = keys.file("")
        for name in names:
            fields = await self.client.store.hgetall(name)
            file_id = name.removeprefix(prefix)
            if not fields:
                continue
            if not await self._copied(file_id):
                if not await self.client.store.exists(name):
                    continue
                self._missing(f"the content of the file {file_id}")
            self._put("file", {"id": file_id, "fields": encode(fields)})

    async def _rows(self, names: Sequence[str]) -> None:
        """Events to be delivered, each with its place in the index of its state."""
        for name in (name.removeprefix(_ROW) for name in names):
            async with self.client.store.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.webhook_row(name))
                for index in (keys.WEBHOOKS_DUE, keys.WEBHOOKS_DELIVERED, keys.WEBHOOKS_DEAD):
                    pipe.zscore(index, name)
                fields, *scores = await pipe.execute()
            if not fields:
                continue
            if source := fields.get(b"source"):
                scores.append(await self.client.store.zscore(keys.replies(text(source)), name))
            due = next((int(score) for score in scores if score is not None), None)
            self._put("row", {"name": name, "fields": encode(fields), "due": due})

    async def _whole(self, names: Sequence[str]) -> None:
        async for entry in self._read(names):
            self._put("key", entry)

    async def _keep_whole(self, names: Sequence[str]) -> None:
        await self._whole(names)

    async def _read_key(self, name: str) -> Entry | None:
        async for entry in self._read([name]):
            return entry
        return None

    async def _read(self, names: Sequence[str]) -> AsyncIterator[Entry]:
        """The existing keys among these."""
        store = self.client.store
        for page in _pages(list(names), PAGE):
            async with store.pipeline(transaction=False) as pipe:
                pipe.time()
                for name in page:
                    pipe.type(name)
                    pipe.pttl(name)
                now, *types = await pipe.execute()
            kinds = [text(kind) for kind in types[::2]]
            async with store.pipeline(transaction=False) as pipe:
                indexes = [k for k, kind in enumerate(kinds) if _queue_read(pipe, page[k], kind)]
                values = dict(zip(indexes, await pipe.execute(), strict=True)) if indexes else {}
            for k, (name, kind) in enumerate(zip(page, kinds, strict=True)):
                value = [row async for row in self._stream(name)] if kind == "stream" else values.get(k)
                if value:
                    yield {"name": name, "type": kind, "at": ms(now), **_ttl(types[2 * k + 1]), "value": encode(value)}

    async def _page(self, name: str, first: str) -> list[Any]:
        """Some entries of a stream, from one on: (id, fields)."""
        page: Any = await self.client.store.xrange(name, first, "+", count=PAGE)
        return list(page)

    async def _stream(self, name: str) -> AsyncIterator[list[Any]]:
        first = "-"
        while page := await self._page(name, first):
            for row, fields in page:
                yield [text(row), [part for item in fields.items() for part in item]]
            first = f"({text(page[-1][0])}"

    # ---- blobs ----------------------------------------------------------------------------------------------------

    async def _copied(self, name: str) -> bool:
        """Copy a blob, once. False if it is missing."""
        if name in self._manifest.blobs:
            return True
        copying = asyncio.create_task(asyncio.to_thread(self.archive.copy_in, self.files, name))
        while not copying.done():  # it may take longer than rows stay in the ledger
            await asyncio.wait((copying,), timeout=FOLLOW_S)
            await self._follow()
        try:
            self._manifest.blobs[name] = copying.result()
        except BlobNotFound:
            return False
        return True

    def _missing(self, description: str) -> None:
        log.warning("not in the backup: %s", description)
        self._manifest.notes.append(f"not in the backup: {description}")

    # ---- the broker -----------------------------------------------------------------------------------------------

    async def _brokers(self) -> None:
        """Data of the broker alone: dead letters, weights, and the number of Celery's messages that wait."""
        broker, start = self.client.broker, 0
        while page := await broker.letters(start, PAGE):
            for letter in page:
                self._put("letter", {"value": encode(letter)})
            start += len(page)
        for tenant, weight in (await broker.weights()).items():
            self._put("weight", {"tenant": tenant, "weight": weight})
        for queue in await self._celery_queues():
            if count := sum((await broker.waiting(queue)).tiers.values()):
                self._manifest.celery[queue] = count

    async def _celery_queues(self) -> list[str]:
        """The queues of plain Celery messages: models', and those beside versions' for what no worker knows yet."""
        store = self.client.store
        models, pools = await store.hkeys(keys.MODELS), await store.hvals(keys.POOLS)
        versions = {version_queue_of(text(entry)) for entry in pools}
        level_queues = [levels.queue_of(version, level) for version in sorted(versions) for level in levels.above()]
        return [*(keys.model_queue(text(model)) for model in models), *level_queues]


def parsed_list(value: Any) -> list[dict[str, Any]]:
    """The parts that a field of a batch names: `[{kind, name, size}, ...]`."""
    wrapper = parsed(f'{{"parts": {value}}}')
    return list(wrapper.get("parts", ()))


def _chunks(entry: Entry) -> list[str]:
    """The ids of a task's chunks, as far as they were written."""
    record, written = entry["record"], str(entry["record"].get("written", ""))
    if "chunks" not in record or "parent" in record or not (written.isascii() and written.isdecimal()):
        return []
    return [chunk_id(entry["id"], number) for number in range(min(int(written[:4]), MAX_CHUNKS))]


def _moved(entry: Entry) -> Reference | None:
    """The blob that holds a task's compacted stream, where one does."""
    raw = entry["result"].get("blob")
    return None if raw is None else Reference.parse(raw)


def _queue_read(pipe: Any, name: str, kind: str) -> bool:
    """Queue the read of a key of this type. False for a stream, and for a missing key."""
    match kind:
        case "hash":
            pipe.hgetall(name)
        case "string":
            pipe.get(name)
        case "set":
            pipe.smembers(name)
        case "zset":
            pipe.zrange(name, 0, -1, withscores=True)
        case "list":
            pipe.lrange(name, 0, -1)
        case _:
            return False
    return True


def _ttl(ttl: int) -> dict[str, int]:
    return {"ttl": ttl} if ttl >= 0 else {}


def _id(row: str) -> tuple[int, ...]:
    return tuple(map(int, row.split("-")))


def _pages(items: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    return (items[k : k + size] for k in range(0, len(items), size))
