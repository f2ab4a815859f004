"""Reads broker, store and ledger with plain commands, without the product's scripts.

Streams are read twice: as soon as a task has ended (`Watcher`, during the run), and after the run. An ended stream must
not change, and settling or compacting it later cannot hide what was read first. The ledger has a row for each task that
ended, and the sums that old rows become.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from redis import Redis
from redis.exceptions import RedisError

from workers.trials.chaos.checker.rest import at_rest

LEDGER: Final = "penstock:ledger"
#: The hours and days that have sums; each one's tenants; of each tenant a hash beside the first.
SUMS: Final = "penstock:usage:sums"
TENANTS: Final = "penstock:usage:tenants:"
STATUSES: Final = ("completed", "failed", "cancelled", "incomplete")
#: What a sum counts, in its order.
COUNTS: Final = (
    *STATUSES,
    *("prompt", "cached", "output", "discarded", "again", "attempts", "deaths", "ms", "engine", "energy"),
)
Row = Mapping[str, str]
#: (key, tenant, one of COUNTS) -> how many.
Totals = Counter[tuple[str, str, str]]
FINAL = frozenset({"completed", "failed", "cancelled", "incomplete"})
#: A stream's entries: (entry id, entry).
Stream = list[tuple[str, Any]]


@dataclass(slots=True)
class Ledger:
    """`rows`: those that were seen, by entry id. `totals`: counts of all tasks, as rows and in sums."""

    rows: dict[str, Row] = field(default_factory=dict)
    totals: Totals = field(default_factory=Counter)

    @classmethod
    def read(cls, store: Redis) -> Ledger:
        """The ledger at one moment. `store`: a client that decodes replies."""
        while True:
            buckets: list[str] = sorted(store.zrange(SUMS, 0, -1))  # type: ignore[arg-type]
            tenants = [sorted(map(str, store.smembers(f"{TENANTS}{bucket}"))) for bucket in buckets]
            pipe = store.pipeline(transaction=True)
            pipe.xrange(LEDGER)
            pipe.zrange(SUMS, 0, -1)
            for bucket in buckets:
                pipe.smembers(f"{TENANTS}{bucket}")
            for bucket, whose in zip(buckets, tenants, strict=True):
                for tenant in whose:
                    pipe.hgetall(f"{SUMS}:{bucket}:{tenant}")
            rows, now, *found_sets = pipe.execute()
            sums = found_sets[len(buckets) :]
            if sorted(now) == buckets and [sorted(whose) for whose in found_sets[: len(buckets)]] == tenants:
                break
        tasks = {entry: row for entry, row in rows if row["id"]}  # the others tell of workers without tasks
        ledger = cls(tasks, total(tasks.values()))
        for group, numbers in (item for bucket in sums for item in bucket.items()):
            key, tenant, *_, tier = json.loads(group)
            if tier in ("idle", "starting"):
                continue
            counts = zip(COUNTS, map(int, numbers.split()), strict=True)
            ledger.totals.update({(key, tenant, name): count for name, count in counts})
        return ledger


def total(rows: Iterable[Row]) -> Totals:
    """The counts of these rows."""
    totals: Totals = Counter()
    for row in rows:
        whose = row["key"], row["tenant"]
        totals[*whose, row["status"]] += 1
        totals.update({(*whose, name): int(row.get(name, 0)) for name in COUNTS if name not in STATUSES})
    return totals


@dataclass(slots=True)
class Stores:
    """The contents of broker and store. `leftovers`: keys that a finished task should not leave behind."""

    records: dict[str, dict[str, str]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    """Current streams, without compacted ones."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id -> Celery's result."""
    links: list[str] = field(default_factory=list)
    """Task ids that the sent links name."""
    leftovers: list[str] = field(default_factory=list)
    dead: list[dict[str, Any]] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
    """The leases of idle live workers."""
    readers: dict[str, float] = field(default_factory=dict)
    """Task id -> seconds since its reader lease ended, by the store's clock."""
    ledger: Ledger = field(default_factory=Ledger)
    accounts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Whose account it is -> its fields."""

    @classmethod
    def read(cls, broker: Redis, store: Redis, *, links: str, only: Iterable[str] | None = None) -> Stores:
        """Read broker and store. The clients decode replies. `links`: the list that links are sent to.

        `only`: read only these tasks, on a system that others use too. Without it, this waits for idle workers' leases.
        """
        stores = cls()
        ids = list(only) if only is not None else _ids(store)
        for part in _parts(ids):
            pipe = store.pipeline(transaction=False)
            for task_id in part:
                pipe.hgetall(f"penstock:task:{task_id}")
                pipe.get(f"celery-task-meta-{task_id}")
            answers = pipe.execute()
            for task_id, record, result in zip(part, answers[::2], answers[1::2], strict=True):
                if record:
                    stores.records[task_id] = record
                if result:
                    stores.results[task_id] = json.loads(result)
        stores.streams = streams_of(store, ids)
        sent = [_linked(str(raw)) for raw in broker.lrange(links, 0, -1)]
        stores.links = [task_id for task_id in sent if task_id is not None]
        stores.dead = letters_of(broker)
        stores.workers = at_rest(broker) if only is None else []
        stores.leftovers = _leftovers(broker, store, None if only is None else set(ids))
        stores.readers = _readers(store, None if only is None else set(ids))
        stores.ledger = Ledger.read(store)
        names = sorted(map(str, store.scan_iter("penstock:limits:*", count=1000)))
        stores.accounts = {name.removeprefix("penstock:limits:"): store.hgetall(name) for name in names}  # type: ignore[misc]
        return stores


class Watcher(threading.Thread):
    """A thread that reads each task's stream once the task has ended, and the ledger's rows before they become sums.

    It follows the journals in `folder` for task ids and retries an unreachable server. `store`: a client that decodes
    replies and has a time limit. `open`: ids of tasks that have not ended.
    """

    def __init__(self, store: Redis, folder: Path, every: float = 0.2) -> None:
        super().__init__(name="watcher", daemon=True)
        self._store = store
        self._folder, self._every = folder, every
        self._offsets: dict[Path, int] = {}
        self._over = threading.Event()
        self.open: set[str] = set()
        self.streams: dict[str, Stream] = {}
        """Each task's stream as it was when the task ended."""
        self.before = Ledger.read(store)
        """The ledger before the run."""
        self.rows: dict[str, Row] = {}
        """The ledger's rows of the run, by entry id."""

    def run(self) -> None:
        while not self._over.wait(self._every):
            self.look()

    def stop(self) -> None:
        """Look once more and end the thread."""
        self._over.set()
        self.join()
        self.look()

    def look(self) -> None:
        """Read the streams of tasks that have ended, and new rows. If the store is away, the next look catches up."""
        self._follow()
        with suppress(RedisError):
            last = max(self.rows or self.before.rows or ["0-0"], key=_order)
            rows: Any = self._store.xrange(LEDGER, f"({last}")
            self.rows |= {entry: row for entry, row in rows if row["id"]}
        for part in _parts(sorted(self.open)):
            try:
                pipe = self._store.pipeline(transaction=False)
                for task_id in part:
                    pipe.hget(f"penstock:task:{task_id}", "end")
                ended = [task_id for task_id, end in zip(part, pipe.execute(), strict=True) if end]
                self.streams |= streams_of(self._store, ended)
            except RedisError:
                return
            self.open -= set(ended)

    def billed(self, end: Ledger) -> Ledger:
        """The run's part of the ledger, of which this is the end."""
        new = {entry: row for entry, row in end.rows.items() if entry not in self.before.rows}
        return Ledger(self.rows | new, end.totals - self.before.totals)

    def _follow(self) -> None:
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            for raw in whole.splitlines():
                if b'"accepted"' in raw[:40] or b'"maybe"' in raw[:40]:
                    task_id = json.loads(raw)["id"]
                    if task_id is not None and task_id not in self.streams:
                        self.open.add(task_id)


def _order(entry: str) -> tuple[int, ...]:
    return tuple(map(int, entry.split("-")))


def streams_of(store: Redis, ids: Iterable[str]) -> dict[str, Stream]:
    """The streams of these tasks, where they exist."""
    streams: dict[str, Stream] = {}
    for part in _parts(list(ids)):
        pipe = store.pipeline(transaction=False)
        for task_id in part:
            pipe.xrange(f"penstock:stream:{task_id}")
        for task_id, entries in zip(part, pipe.execute(), strict=True):
            if entries:
                streams[task_id] = [(name, json.loads(fields["e"])) for name, fields in entries]
    return streams


def unfinished(store: Redis, ids: Iterable[str] | None = None) -> list[str]:
    """Ids of tasks whose record is not final or not settled."""
    open_ids = []
    for part in _parts(list(ids) if ids is not None else _ids(store)):
        pipe = store.pipeline(transaction=False)
        for task_id in part:
            pipe.hmget(f"penstock:task:{task_id}", "status", "settled")
        for task_id, (status, settled) in zip(part, pipe.execute(), strict=True):
            if status is not None and (status not in FINAL or settled is None):
                open_ids.append(task_id)
    return open_ids


def pending(broker: Redis) -> list[str]:
    """Keys that hold messages: waiting, in flight, delayed."""
    kinds = ("penstock:queue:", "penstock:sorted:", "penstock:turn:", "penstock:inflight:", "penstock:delayed:")
    on_sqs = ("penstock:sqs:waiting:", "penstock:sqs:inflight:", "penstock:sqs:delayed:")
    return sorted(name for name in broker.scan_iter("penstock:*", count=1000) if name.startswith(kinds + on_sqs))


def wait_until_over(
    broker: Redis, store: Redis, seconds: float, ids: Iterable[str] | None = None, *, shared: bool = False
) -> list[str]:
    """Wait until no work is left, for at most `seconds`. Returns what is left. `shared`: others use the system."""
    ids, deadline = None if ids is None else list(ids), time.monotonic() + seconds
    while True:
        try:
            remaining = unfinished(store, ids) + ([] if shared else pending(broker))
        except RedisError as error:
            remaining = [f"no answer: {error}"]
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.1)


def _leftovers(broker: Redis, store: Redis, only: set[str] | None) -> list[str]:
    """Keys and members that finished tasks should not leave behind."""
    leftovers = [] if only is not None else pending(broker)
    if only is None:
        for index in ("reaped", "returned"):
            leftovers += [f"penstock:{index} {name}" for name in map(str, broker.hkeys(f"penstock:{index}"))]
        for counts in ("waiting", "waiting:tokens", "waiting:tenants", "waiting:keys"):  # each is gone at 0
            leftovers += [f"penstock:{counts} {name}" for name in map(str, store.hkeys(f"penstock:{counts}"))]
    for index in ("submitting", "deadlines", "unsettled"):
        members = list(map(str, store.zrange(f"penstock:{index}", 0, -1)))
        leftovers += [f"penstock:{index} {name}" for name in members if only is None or name in only]
    return leftovers


def _readers(store: Redis, only: set[str] | None) -> dict[str, float]:
    """Task id -> seconds since its reader lease ended (negative: it still holds)."""
    seconds, micros = store.time()
    leases: Any = store.zrange("penstock:readers", 0, -1, withscores=True)
    now = seconds + micros / 1e6
    return {task_id: now - over / 1000 for task_id, over in leases if only is None or task_id in only}


def letters_of(broker: Redis) -> list[dict[str, Any]]:
    """The dead letters. `broker`: a client that decodes replies."""
    return [_letter(str(raw)) for raw in broker.lrange("penstock:dead", 0, -1)]


def _letter(raw: str) -> dict[str, Any]:
    """Parse a dead letter; an unreadable entry, perhaps somebody else's, gives a letter with that reason."""
    with suppress(ValueError, RecursionError):
        letter = json.loads(raw)
        if isinstance(letter, dict):
            return {**letter, "message": str(letter.get("message", ""))}
    return {"reason": "not an entry of this list", "message": raw}


def _linked(raw: str) -> str | None:
    """The first argument of a Celery message."""
    message: Mapping[str, Any] = json.loads(raw)
    body = message["body"]
    if message.get("properties", {}).get("body_encoding") == "base64":
        body = base64.b64decode(body)
    args = json.loads(body)[0]
    return args[0] if args else None


def _ids(store: Redis) -> list[str]:
    return [name.removeprefix("penstock:task:") for name in store.scan_iter("penstock:task:*", count=1000)]


def _parts(ids: list[str]) -> list[list[str]]:
    return [ids[at : at + 200] for at in range(0, len(ids), 200)]
