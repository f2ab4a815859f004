"""Makes a system of a backup, in an empty store.

    begin: nothing else lives here ─▶ plan ─▶ run: epoch restoring ─▶ blobs ─▶ segments ─▶ counts, broker ─▶ open

Every write puts something as it is to be, so all of it may be done twice. `penstock:restore` has what was begun, with
its time, and how many segments are done: a restore that was killed goes on there. Until the epoch is open, no process
starts on this store, so nobody sees a part of it. What is derived (indexes, counts of what waits, accounts' reserved
tokens, tenants' bytes) is made of the records, never read from the backup.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError

from producers.backup import journal, plan
from producers.backup.archive import Archive, Entry, Manifest, commands, decode, pairs
from producers.backup.plan import BatchFacts, Plan, TaskFacts, charge_of, is_erased, row_id
from producers.client.aio import AsyncClient
from producers.connection.connect import connect_async, is_redis, shown
from producers.connection.script import Call, aexecute_many, arun, ms, script, text
from producers.contract import keys
from producers.contract.sealing import Keyring
from producers.errors import PenstockError
from producers.store import epoch, task_index
from producers.store.access.api_keys import Key
from producers.store.access.audit import Change, operator
from producers.store.batches import LISTED_S
from producers.store.blobs import BlobNotFound, Blobs, lines, open_blobs
from producers.store.protocol import ERASED_S, NOTED_S, PACKAGE
from producers.store.references import Reference

Command = tuple[Any, ...]

#: Commands of one round trip.
PIPELINE_SIZE: Final = 500
#: Time (s) for which counts of accounts and of tenants' bytes are kept (`scripts/_limits.lua`, `_kept.lua`).
COUNTS_S: Final = 62 * 24 * 3600
#: Time (s) for which the index of a tenant's ended rows is kept (`scripts/_outbox_kept.lua`).
ROWS_S: Final = 40 * 24 * 3600
#: Age (ms) that a restored task has among those that are submitted: the next look of a sweeper sends its message.
SUBMITTED_MS: Final = 120_000
#: Fields of an account that are of tasks and minutes.
_OF_TASKS: Final = ("minute", "requests", "tokens", "open", "reserved", "pledged")
#: The list of dead letters, on Redis and, for a broker on SQS, in the store.
_DEAD: Final = "penstock:dead"
_INDEXES: Final = {"due": keys.WEBHOOKS_DUE, "delivered": keys.WEBHOOKS_DELIVERED, "dead": keys.WEBHOOKS_DEAD}


class NotRestored(PenstockError):
    """Nothing was restored; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Choices:
    """An operator's choices. A restore that goes on has the same.

    `deadlines`: `shift` or `keep`. `journal`: its place; empty: there is none. `broker_kept`: the broker has the
    messages that it had.
    """

    deadlines: str = "shift"
    journal: str = ""
    broker_kept: bool = False


@dataclass(frozen=True, slots=True)
class Servers:
    """URLs. `old`: the old system's store, which is asked whether workers live; `stopped`: its processes have, as an
    operator says."""

    store: str
    broker: str
    old: str | None = None
    stopped: bool = False


@dataclass(slots=True)
class Restore:
    """One restore. `files`: the new system's blobs. `done`: segments that an earlier run did; `counted`: it
    did all but the last steps. `each`: called with the
    number of segments that are done."""

    client: AsyncClient
    archive: Archive
    files: Blobs
    plan: Plan
    choices: Choices
    servers: Servers
    epoch: str
    done: int = 0
    counted: bool = False
    each: Callable[[int], None] = field(default=lambda done: None)

    async def run(self) -> None:
        """Restore, or go on with what was begun. Raises Damaged, redis errors and OSError."""
        store, manifest = self.client.store, self.plan.manifest
        begun: dict[Any, Any] = {
            "backup": manifest.id,
            "at": self.plan.now,
            "choices": json.dumps(asdict(self.choices)),
        }
        state: dict[Any, Any] = {"id": self.epoch, "state": epoch.RESTORING, "backup": manifest.id, "at": self.plan.now}
        async with store.pipeline(transaction=True) as pipe:
            pipe.hset(keys.EPOCH, mapping=state)
            pipe.hset(keys.RESTORE, mapping=begun)
            await pipe.execute()
        await asyncio.to_thread(self._copy_blobs)
        for number in range(self.done, len(manifest.segments)):
            segment_commands = await asyncio.to_thread(self._commands_of, number)
            await self._do(segment_commands)
            await aexecute_many(store, [("HSET", keys.RESTORE, "segments", number + 1)])
            self.each(number + 1)
        if not self.counted:
            counts = (self._waiting(), self._accounts(), self._kept(), self._outbox(), self._ledger())
            for part in (self._changed_hashes(), *counts, self._erasures()):
                await self._do(part)
            await self._brokers()
            await aexecute_many(store, [("HSET", keys.RESTORE, "counted", 1)])
        await self._end_celery()  # changes the counts, so that they must not be made anew
        change = Change(operator(), "store.restore", manifest.id)
        async with store.pipeline(transaction=True) as pipe:
            pipe.xadd(keys.AUDIT, {"change": change.to_json()})
            pipe.hset(keys.EPOCH, "state", epoch.OPEN)
            pipe.delete(keys.RESTORE)
            await pipe.execute()
        change.say()

    async def _do(self, queued: Iterable[Command]) -> None:
        chunk: list[Command] = []
        for command in queued:
            chunk.append(command)
            if len(chunk) == PIPELINE_SIZE:
                await aexecute_many(self.client.store, chunk)
                chunk = []
        await aexecute_many(self.client.store, chunk)

    def _copy_blobs(self) -> None:
        blobs = self.plan.manifest.blobs
        for name in dict.fromkeys(self.plan.blobs()):
            if (stored := blobs.get(name)) is not None and not _is_there(self.files, name):
                self.archive.copy_out(stored, self.files, name)

    # ---- what the backup has --------------------------------------------------------------------------------------

    def _commands_of(self, number: int) -> list[Command]:
        """The commands for a segment's entries. Blocks: the input of a batch may be read."""
        result: list[Command] = []
        for at, entry in enumerate(self.archive.entries(self.plan.manifest.segments[number])):
            position = number, at
            match entry["kind"]:
                case "task" if self.plan.keeps("task", entry["id"], position):
                    result += self._task(entry, self.plan.tasks[entry["id"]])
                case "batch" if self.plan.keeps("batch", entry["id"], position):
                    result += self._batch(entry, self.plan.batches[entry["id"]])
                case "file" if self.plan.keeps("file", entry["id"], position):
                    result += self._file(entry)
                case "row" if self.plan.keeps("row", entry["name"], position):
                    result += self._row(entry)
                case "key" if self.plan.keeps("key", entry["name"], position):
                    result += self._key(entry)
        return result

    def _task(self, entry: Entry, task: TaskFacts) -> Iterator[Command]:
        task_id, record = entry["id"], dict(entry["record"])
        name, stream, result = keys.task(task_id), keys.stream(task_id), keys.result(task_id)
        for of_delivery in ("claim", "owner"):
            record.pop(of_delivery, None)
        if not task.final:
            record["restored"] = "1"
            # Of a plain task there is no message to send: it ends (`_end_celery`), or its own one comes.
            # Nor has a parent any: its chunks have.
            record["status"] = "queued" if task.plain or "chunks" in record else "submitting"
            if task.deadline is not None:
                record["deadline"] = str(task.deadline + self.plan.shift)
        yield ("DEL", name, stream, result)
        yield from commands(name, "hash", record)
        yield from commands(stream, "stream", entry["stream"])
        yield from commands(result, "hash", self._moved(entry["result"], task))
        if task.ends is not None:
            yield ("PEXPIREAT", name, task.ends)
            for kept_longer in (stream, result):
                yield ("PEXPIREAT", kept_longer, task.ends + plan.MINUTE_MS)
        if task.blob:
            ends = (task.ends or self.plan.now) // 1000 + 120
            yield ("ZADD", keys.FILE_NOTES, ends - NOTED_S, task.blob)
        yield from self._task_indexes(task_id, task, record, bool(entry["stream"]))
        if entry.get("entry") is not None:
            yield from self._whole(entry["entry"])

    def _task_indexes(
        self, task_id: str, task: TaskFacts, record: dict[str, Any], has_stream: bool
    ) -> Iterator[Command]:
        if task.origin == "shadow":
            yield ("ZADD", keys.SHADOW_COPIES, task.created, task_id)
        elif not task.plain and task.origin not in ("batch", "chunk"):
            index = task_index.tasks_of if task.origin == "task" else task_index.requests_of
            yield ("ZADD", index(None), task.created, task_id)
            if task.tenant:
                yield ("ZADD", index(task.tenant), task.created, task_id)
                yield ("SADD", keys.TENANTS, task.tenant)
        if task.final:
            if "settled" not in record:
                yield ("ZADD", keys.UNSETTLED, record.get("finished", task.created), task_id)
            elif has_stream:
                yield ("ZADD", keys.SETTLED, record["settled"], task_id)
            return
        times = [int(record[name]) for name in ("deadline", "cancel") if name in record]
        if times:
            yield ("ZADD", keys.DEADLINES, min(times), task_id)
        if not task.plain:
            if "chunks" in record:
                yield ("ZADD", keys.PARENTS, task.created, task_id)
            else:
                yield ("ZADD", keys.SUBMITTING, self.plan.now - SUBMITTED_MS, task_id)
            if not task.origin:  # nobody waits for it any more
                yield ("ZADD", keys.READERS, self.plan.now, task_id)

    def _moved(self, result: dict[str, Any], task: TaskFacts) -> dict[str, Any]:
        """A compacted stream, with its blob in the new system's store of blobs."""
        if not task.blob:
            return result
        return {**result, "blob": replace(Reference.parse(decode(result["blob"])), place=self.files.location).to_json()}

    def _batch(self, entry: Entry, batch: BatchFacts) -> Iterator[Command]:
        batch_id, fields = entry["id"], dict(batch.fields)
        refused, tenant = dict(batch.refused), str(fields.get("tenant", ""))
        if not batch.ended:
            written, offset = batch.count("written"), batch.count("offset")
            if batch.line != batch.count("line"):
                offset = self._offset(batch)
            fields |= {"line": batch.line, "offset": offset, "completed": batch.completed, "failed": batch.failed}
            fields |= {"restored": 1, "deadline": batch.count("deadline") + self.plan.shift}
            if fields["status"] == "finalizing" and batch.line < batch.count("total"):
                fields["status"] = "in_progress"
                del fields["finalizing_at"]
            refused = {line: error for line, error in refused.items() if written <= int(line) < batch.line}
        names = (
            keys.batch(batch_id),
            keys.batch_refused(batch_id),
            keys.batch_parts(batch_id),
            keys.batch_begun(batch_id),
        )
        yield ("DEL", *names)
        yield from commands(names[0], "hash", fields)
        yield ("ZADD", keys.BATCH_INDEX, 0, batch_id)
        if tenant:
            yield ("ZADD", keys.batch_index(tenant), 0, batch_id)
            yield ("EXPIRE", keys.batch_index(tenant), LISTED_S)
        if batch.ends is not None:
            yield ("PEXPIREAT", names[0], batch.ends)
            return
        yield from commands(names[1], "hash", refused)
        yield from commands(names[2], "hash", batch.parts)
        yield from commands(names[3], "set", entry["begun"])
        yield ("ZADD", keys.BATCHES, batch.count("created"), batch_id)
        yield ("SADD", keys.open_batches(tenant), batch_id)

    def _offset(self, batch: BatchFacts) -> int:
        """The offset of a batch's cursor in its input, which is copied already."""
        offset = batch.count("written_offset")
        remaining = batch.line - batch.count("written")
        try:
            for line in lines(self.files, str(batch.fields["input_file"]), offset):
                if not remaining:
                    break
                offset = line.end
                remaining -= line.data is None or bool(line.data.strip())
        except BlobNotFound:  # the batch fails for want of it
            pass
        return offset

    def _file(self, entry: Entry) -> Iterator[Command]:
        file_id, fields = entry["id"], entry["fields"]
        tenant, purpose = str(fields.get("tenant", "")), str(fields["purpose"])
        yield ("DEL", keys.file(file_id))
        yield from commands(keys.file(file_id), "hash", fields)
        yield ("ZADD", keys.files(tenant), 0, file_id)
        yield ("ZADD", keys.files(tenant, purpose), 0, file_id)
        if (ends := self.plan.files[file_id][1]) is not None:
            yield ("ZADD", keys.FILES_EXPIRING, ends, file_id)

    def _row(self, entry: Entry) -> Iterator[Command]:
        name, row = entry["name"], self.plan.rows[entry["name"]]
        fields = {field: value for field, value in entry["fields"].items() if field != "holder"} | {"restored": 1}
        yield ("DEL", keys.webhook_row(name))
        yield from commands(keys.webhook_row(name), "hash", fields)
        at = self.plan.now if entry["due"] is None else entry["due"]
        if row.source and row.state == "due":
            yield ("SADD", keys.REPLIES, row.source)
            yield ("ZADD", keys.replies(row.source), at, name)
        elif row.state in _INDEXES:
            yield ("ZADD", _INDEXES[row.state], at, name)
        if row.state in ("delivered", "dead"):
            tenant_index = keys.webhooks_ended(row.state, row.tenant)
            yield ("ZADD", tenant_index, at, name)
            yield ("EXPIRE", tenant_index, ROWS_S)

    def _key(self, entry: Entry) -> Iterator[Command]:
        name = entry["name"]
        if name.startswith(keys.account("")) or name in journal.HASHES.values():
            return  # `_accounts`, `_changed_hashes`
        if name.startswith(keys.celery_result("")) and is_erased(
            self.plan, name.removeprefix(keys.celery_result("")), 0
        ):
            return
        if name.startswith(keys.idempotency("")) and is_erased(self.plan, str(entry["value"].get("id")), 0):
            return
        yield from self._whole(entry)

    def _whole(self, entry: Entry) -> Iterator[Command]:
        """A key as it was, unless its time is over."""
        yield ("DEL", entry["name"])
        ends = entry["at"] + entry["ttl"] if "ttl" in entry else None
        if ends is None or ends > self.plan.now:
            yield from commands(entry["name"], entry["type"], entry["value"])
            if ends is not None:
                yield ("PEXPIREAT", entry["name"], ends)

    # ---- what the journal has -------------------------------------------------------------------------------------

    def _changed_hashes(self) -> Iterator[Command]:
        """API keys, tenants' limits and endpoints: as the backup has them, and as they were changed since."""
        for name in journal.HASHES.values():
            value = dict(self.plan.hashes.get(name, {}))
            if self.plan.since is not None:
                value |= self.plan.since.fields.get(name, {})
            value = {field: raw for field, raw in value.items() if raw is not None}
            if name == keys.API_KEYS and not self.plan.confirmed:
                value = {field: _unconfirmed(raw, self.plan.now // 1000) for field, raw in value.items()}
            yield ("DEL", name)
            yield from commands(name, "hash", value)

    def _ledger(self) -> Iterator[Command]:
        yield ("DEL", keys.LEDGER)
        for row in sorted(self.plan.usage, key=row_id):
            yield ("XADD", keys.LEDGER, row, *pairs(self.plan.usage[row]))

    def _erasures(self) -> Iterator[Command]:
        """Marks deleted tasks (DELETE), so that a late request does not make them again."""
        for name in self.plan.since.erased if self.plan.since is not None else ():
            if name not in self.plan.tasks and not name.startswith("file-"):
                yield ("SET", keys.erased(name), "restored", "EX", ERASED_S)

    # ---- what is counted ------------------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[Command]:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for task in self.plan.tasks.values():
            if task.final or not task.waits:
                continue
            kind, tokens, queue = task.waits.split(" ", 2)
            counts[keys.WAITING].update([kind, f"{kind} {queue}"])
            counts[keys.WAITING_TOKENS][f"{kind} {queue}"] += int(tokens)
            counts[keys.WAITING_TOKENS]["results"] += -(-task.result_bytes // 8)
            if kind != "line":
                counts[keys.WAITING_TENANTS][task.tenant] += 1
                counts[keys.WAITING_KEYS].update([task.key] if task.key else [])
        for name in (keys.WAITING, keys.WAITING_TOKENS, keys.WAITING_TENANTS, keys.WAITING_KEYS):
            yield ("DEL", name)
            yield from commands(name, "hash", {field: count for field, count in counts[name].items() if count > 0})

    def _accounts(self) -> Iterator[Command]:
        reserved: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for task in self.plan.tasks.values():
            charge = None if task.final else charge_of(task)
            for name in charge["accounts"] if charge else ():
                sums = reserved[name]
                sums[0] += 1
                sums[1] += int(charge["tokens"] if charge else 0)
                sums[2] += int((charge or {}).get("money") or 0)
        for name in self.plan.accounts.keys() | reserved.keys():
            fields = {
                field: value for field, value in self.plan.accounts.get(name, {}).items() if field not in _OF_TASKS
            }
            fields |= dict(zip(("open", "reserved", "pledged"), reserved[name], strict=True))
            yield ("DEL", name)
            yield from commands(name, "hash", {field: value for field, value in fields.items() if value is not None})
            if not fields["open"]:
                yield ("EXPIRE", name, COUNTS_S)

    def _kept(self) -> Iterator[Command]:
        """Bytes of tenants' tasks (`scripts/_kept.lua`)."""
        bytes_: dict[str, Counter[str]] = defaultdict(Counter)
        for task in self.plan.tasks.values():
            size, _, ends = task.kept.partition(" ")
            if not size.isdigit():
                continue
            counts = bytes_[keys.kept(task.tenant)]
            counts["total"] += int(size)
            if ends:
                counts[ends] += int(size)
        for name, counts in bytes_.items():
            ends_of = [int(field) for field in counts if field != "total"]
            yield ("DEL", name)
            yield from commands(name, "hash", {**counts, **({"next": min(ends_of)} if ends_of else {})})
            yield ("EXPIRE", name, COUNTS_S)

    def _outbox(self) -> Iterator[Command]:
        due = Counter(row.tenant for row in self.plan.rows.values() if row.state == "due" and not row.source)
        yield ("DEL", keys.WEBHOOKS_WAITING)
        yield from commands(keys.WEBHOOKS_WAITING, "hash", due)

    # ---- the broker -----------------------------------------------------------------------------------------------

    async def _brokers(self) -> None:
        """Tenants' weights; and dead letters, unless the broker has them still."""
        for tenant, weight in self.plan.weights.items():
            await self.client.broker.weigh(tenant, weight)
        server = connect_async(self.servers.broker if is_redis(self.servers.broker) else self.servers.store)
        try:
            if self.plan.letters and not await server.exists(_DEAD):
                await server.execute_command("RPUSH", _DEAD, *map(decode, self.plan.letters))
        finally:
            await server.aclose()

    async def _end_celery(self) -> None:
        """Plain Celery tasks that had begun: their messages were in the broker alone."""
        if self.choices.broker_kept:
            return
        for task_id, task in self.plan.tasks.items():
            if task.plain and not task.final:
                names = keys.task(task_id), keys.stream(task_id)
                await arun(self.client.store, Call(script(PACKAGE, "restored"), names, (task_id,)))


# ---- before it begins ----------------------------------------------------------------------------------------------


async def begin(
    client: AsyncClient, archive: Archive, files: Blobs, servers: Servers, choices: Choices, ring: Keyring
) -> Restore:
    """Look whether a backup may be restored here, and what becomes of it. Writes nothing.

    Raises NotRestored, Damaged, redis errors and OSError.
    """
    manifest = await asyncio.to_thread(archive.read_manifest)
    await _check_others(client, servers, manifest, choices)
    begun = {text(name): text(value) for name, value in (await client.store.hgetall(keys.RESTORE)).items()}
    if begun:
        _check_same(begun, manifest, choices)
    else:
        await _check_empty(client.store, files, servers)
    now = int(begun["at"]) if begun else ms(await client.store.time())
    state = await aexecute_many(client.store, [("HMGET", keys.EPOCH, "id", "state")])
    going_on = text(state[0][1] or b"") == epoch.RESTORING
    since = None
    if choices.journal:
        since = await asyncio.to_thread(journal.read, open_blobs(choices.journal), ring, manifest.epoch, manifest.began)
    shift = choices.deadlines == "shift"
    restore_plan = await asyncio.to_thread(plan.read, archive, manifest, since, now, shift=shift)
    new = text(state[0][0]) if going_on else secrets.token_hex(6)
    return Restore(
        client, archive, files, restore_plan, choices, servers, new, int(begun.get("segments", 0)), "counted" in begun
    )


def _check_same(begun: dict[str, str], manifest: Manifest, choices: Choices) -> None:
    """Raises NotRestored where another restore was begun."""
    if begun["backup"] != manifest.id or json.loads(begun["choices"]) != asdict(choices):
        raise NotRestored(
            "another restore into this store was begun, of another backup or with other options: end that one, or "
            "begin with an empty server"
        )


async def _check_empty(store: Redis, files: Blobs, servers: Servers) -> None:
    """Raises NotRestored where something is here already."""
    cursor = 0
    while True:
        cursor, page = await store.scan(cursor, match="penstock:*", count=1000)
        if page:
            raise NotRestored(
                f"the store at {shown(servers.store)} is not empty ({text(page[0])}): a backup is restored into a "
                "server of its own"
            )
        if cursor == 0:
            break
    if await asyncio.to_thread(files.names, ""):
        raise NotRestored(f"{files.location} is not empty: the restored system needs a place of files of its own")
    for database in await _databases(store):
        async with _other_database(servers.store, database) as other:
            if await other.exists(keys.MODELS, keys.TASKS, keys.API_KEYS):
                raise NotRestored(
                    f"database {database} of {shown(servers.store)} is a store, too: databases of one server share "
                    "channels, so a backup is restored into a server of its own"
                )


async def _databases(store: Redis) -> list[int]:
    """The numbers of the server's databases that have keys; none where this user may not ask."""
    try:
        keyspace = await store.info("keyspace")
    except RedisError:
        return []
    return [int(name.removeprefix("db")) for name in keyspace if name.startswith("db")]


def _other_database(url: str, number: int) -> Redis:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return connect_async(urlunsplit(parts._replace(query=f"db={number}")))
    path = parts.path.rpartition("/")[0]
    return connect_async(urlunsplit(parts._replace(path=f"{path}/{number}")))


async def _check_others(client: AsyncClient, servers: Servers, manifest: Manifest, choices: Choices) -> None:
    """Raises NotRestored while the old system's workers live, or may live where they would take the new one's tasks."""
    living = [worker.incarnation for worker in await client.broker.workers() if worker.remaining_s is not None]
    if living:
        raise NotRestored(f"workers hold leases at {shown(servers.broker)}: {_shortened(living)}. Stop them first")
    if servers.old is not None:
        living = await _leases(servers.old)
        if living:
            raise NotRestored(f"workers hold leases at {shown(servers.old)}: {_shortened(living)}. Stop them first")
    elif not servers.stopped and (choices.broker_kept or shown(servers.broker) == manifest.broker):
        raise NotRestored(
            f"the old system used the broker {manifest.broker}, too, and its workers would take this one's tasks: name "
            "its store with --old-store, or say --old-stopped if they have stopped for good"
        )


async def _leases(url: str) -> list[str]:
    """The incarnations with a lease in a store. Raises NotRestored where it does not answer."""
    store, prefix, incarnations, cursor = connect_async(url), keys.lease(""), list[str](), 0
    try:
        while True:
            cursor, page = await store.scan(cursor, match=f"{prefix}*", count=1000)
            incarnations += [text(name).removeprefix(prefix) for name in page]
            if cursor == 0:
                return incarnations
    except (RedisError, OSError) as error:
        raise NotRestored(
            f"cannot ask the old store at {shown(url)} whether workers live ({error}): if its server is lost and its "
            "processes have stopped, say --old-stopped in place of --old-store"
        ) from error
    finally:
        await store.aclose()


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unconfirmed(raw: Any, now: int) -> Any:
    """A key that lets nobody in before it is confirmed; one that let nobody in stays as it is."""
    key = Key.parse(decode(raw))
    if key is None or key.state(now) != "active":
        return raw
    return replace(key, disabled_at=now, unconfirmed=True).to_json()


def _is_there(blobs: Blobs, name: str) -> bool:
    try:
        blobs.size(name)
    except BlobNotFound:
        return False
    return True
