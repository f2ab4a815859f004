"""Reads broker and store with plain commands, without the product's scripts.

Streams are read twice: as soon as a task has ended (`Watcher`, during the run), and after the run. An ended stream must
not change, and settling or compacting it later cannot hide what was read first.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from workers.chaos.checker.ledger import LEDGER, Ledger, Row
from workers.chaos.checker.rest import at_rest

FINAL = frozenset({"completed", "failed", "cancelled", "incomplete"})
#: A stream's entries: (entry id, entry).
Stream = list[tuple[str, Any]]


@dataclass(slots=True)
class Stores:
    """The contents of broker and store. `left`: keys that a finished task should not leave behind."""

    records: dict[str, dict[str, str]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    """Current streams, without compacted ones."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id -> Celery's result."""
    links: list[str] = field(default_factory=list)
    """Task ids that the sent links name."""
    left: list[str] = field(default_factory=list)
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
        found = cls()
        ids = list(only) if only is not None else _ids(store)
        for part in _parts(ids):
            pipe = store.pipeline(transaction=False)
            for task_id in part:
                pipe.hgetall(f"penstock:task:{task_id}")
                pipe.get(f"celery-task-meta-{task_id}")
            answers = pipe.execute()
            for task_id, record, result in zip(part, answers[::2], answers[1::2], strict=True):
                if record:
                    found.records[task_id] = record
                if result:
                    found.results[task_id] = json.loads(result)
        found.streams = streams_of(store, ids)
        sent = [_linked(str(raw)) for raw in broker.lrange(links, 0, -1)]
        found.links = [task_id for task_id in sent if task_id is not None]
        found.dead = letters_of(broker)
        found.workers = at_rest(broker) if only is None else []
        found.left = _left(broker, store, None if only is None else set(ids))
        found.readers = _readers(store, None if only is None else set(ids))
        found.ledger = Ledger.read(store)
        names = sorted(map(str, store.scan_iter("penstock:limits:*", count=1000)))
        found.accounts = {name.removeprefix("penstock:limits:"): store.hgetall(name) for name in names}  # type: ignore[misc]
        return found


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
            self.rows |= dict(self._store.xrange(LEDGER, f"({last}"))  # type: ignore[arg-type]
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
    found: dict[str, Stream] = {}
    for part in _parts(list(ids)):
        pipe = store.pipeline(transaction=False)
        for task_id in part:
            pipe.xrange(f"penstock:stream:{task_id}")
        for task_id, entries in zip(part, pipe.execute(), strict=True):
            if entries:
                found[task_id] = [(name, json.loads(fields["e"])) for name, fields in entries]
    return found


def unfinished(store: Redis, ids: Iterable[str] | None = None) -> list[str]:
    """Ids of tasks whose record is not final or not settled."""
    found = []
    for part in _parts(list(ids) if ids is not None else _ids(store)):
        pipe = store.pipeline(transaction=False)
        for task_id in part:
            pipe.hmget(f"penstock:task:{task_id}", "status", "settled")
        for task_id, (status, settled) in zip(part, pipe.execute(), strict=True):
            if status is not None and (status not in FINAL or settled is None):
                found.append(task_id)
    return found


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
            left = unfinished(store, ids) + ([] if shared else pending(broker))
        except RedisError as error:
            left = [f"no answer: {error}"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _left(broker: Redis, store: Redis, only: set[str] | None) -> list[str]:
    """Keys and members that finished tasks should not leave behind."""
    found = [] if only is not None else pending(broker)
    if only is None:
        for index in ("reaped", "returned"):
            found += [f"penstock:{index} {name}" for name in map(str, broker.hkeys(f"penstock:{index}"))]
        for counts in ("waiting", "waiting:tokens", "waiting:tenants", "waiting:keys"):  # each is gone at 0
            found += [f"penstock:{counts} {name}" for name in map(str, store.hkeys(f"penstock:{counts}"))]
    for index in ("submitting", "deadlines", "unsettled"):
        members = list(map(str, store.zrange(f"penstock:{index}", 0, -1)))
        found += [f"penstock:{index} {name}" for name in members if only is None or name in only]
    return found


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
        said = json.loads(raw)
        if isinstance(said, dict):
            return {**said, "message": str(said.get("message", ""))}
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
