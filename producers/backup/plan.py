"""Reads a whole backup before anything is written, and decides which entries a restored system has.

    archive ─▶ of each id the last entry ─▶ less what was erased, or has had its time ─▶ batches made whole

A batch was read after its lines. Those that its cursor counts and the backup lacks are made again: the cursor goes back
to the first of them (`Batch.line`), and later ones are dropped. The counts of a batch are counted again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from producers.backup.archive import Archive, Entry, Manifest, decode
from producers.backup.journal import HASHES, JournalChanges
from producers.connection.script import parsed
from producers.contract import keys
from producers.contract.record import FINAL
from producers.store.batches import ENDED
from producers.store.references import Reference

#: Time (ms) by which a stream outlives its record.
MINUTE_MS: Final = 60_000
_ERASED: Final = keys.erased("")

EntryPosition = tuple[int, int]
"""The number of a segment, and of an entry in it."""


@dataclass(slots=True)
class TaskFacts:
    """The facts of a task that a restore's plan needs. Times are server ms; `ends`: when its record goes."""

    position: EntryPosition
    status: str
    created: int
    ends: int | None
    deadline: int | None
    batch: str
    line: int
    parent: str
    """Of a chunk (`producers.store.chunks`)."""
    origin: str
    plain: bool
    tenant: str
    key: str
    waits: str
    result_bytes: int
    reserved: str
    kept: str
    rows: frozenset[str]
    blob: str

    @property
    def final(self) -> bool:
        return self.status in FINAL

    @classmethod
    def of(cls, position: EntryPosition, entry: Entry) -> TaskFacts:
        record = entry["record"]

        def text_of(name: str) -> str:
            return str(record.get(name, ""))

        blob = entry["result"].get("blob")
        return cls(
            position,
            text_of("status"),
            _number(text_of("created")) or 0,
            entry["at"] + entry["ttl"] if "ttl" in entry else None,
            _number(text_of("deadline")),
            text_of("batch"),
            _number(text_of("line")) or 0,
            text_of("parent"),
            text_of("origin"),
            "plain" in record,
            text_of("tenant"),
            text_of("key"),
            text_of("waits"),
            _number(text_of("result_bytes")) or 0,
            text_of("reserved"),
            text_of("kept"),
            frozenset(text_of("rows").split()),
            "" if blob is None else Reference.parse(decode(blob)).name,
        )


@dataclass(slots=True)
class BatchFacts:
    """A batch as it will be. `line`: its cursor; `closed`: nothing of it is left but itself."""

    position: EntryPosition
    fields: dict[str, Any]
    refused: dict[str, Any]
    parts: dict[str, Any]
    ends: int | None
    line: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def ended(self) -> bool:
        return self.fields.get("status") in ENDED

    @property
    def closed(self) -> bool:
        return self.ends is not None

    def count(self, name: str) -> int:
        return _number(str(self.fields.get(name, ""))) or 0

    @property
    def blobs(self) -> list[str]:
        """Its parts."""
        return [part["name"] for parts in self.parts.values() for part in json.loads(str(parts))]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """A delivery of an event. `at`: when the event was (unix s)."""

    position: EntryPosition
    object: str
    type: str
    at: int
    state: str
    tenant: str
    source: str

    @classmethod
    def of(cls, position: EntryPosition, fields: Mapping[str, Any]) -> RowFacts:
        def text_of(name: str) -> str:
            return str(fields.get(name, ""))

        at = _number(text_of("at")) or 0
        return cls(
            position, text_of("object"), text_of("type"), at, text_of("state"), text_of("tenant"), text_of("source")
        )

    @property
    def task_id(self) -> str:
        return self.object.removeprefix("resp_")


@dataclass(slots=True)
class Plan:
    """The data that will be restored. `now`: the restored store's time (ms) at the restore's beginning."""

    manifest: Manifest
    since: JournalChanges | None
    now: int
    shift: int
    """Time (ms) by which deadlines move."""
    tasks: dict[str, TaskFacts] = field(default_factory=dict)
    batches: dict[str, BatchFacts] = field(default_factory=dict)
    files: dict[str, tuple[EntryPosition, int | None]] = field(default_factory=dict)
    """Id -> where it is, and when it goes (unix s)."""
    rows: dict[str, RowFacts] = field(default_factory=dict)
    others: dict[str, EntryPosition] = field(default_factory=dict)
    """Name of any other key -> where it is."""
    hashes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a hash that the journal follows -> its fields."""
    letters: list[Any] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    accounts: dict[str, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    folded: str = "0-0"
    erased: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def confirmed(self) -> bool:
        """Whether the journal says which API keys hold."""
        return self.since is not None and self.since.covers

    def keeps(self, kind: str, name: str, position: EntryPosition) -> bool:
        """Whether this entry is restored, as far as its place decides."""
        match kind:
            case "task":
                return name in self.tasks and self.tasks[name].position == position
            case "batch":
                return name in self.batches and self.batches[name].position == position
            case "file":
                return name in self.files and self.files[name][0] == position
            case "row":
                return name in self.rows and self.rows[name].position == position
        return self.others.get(name) == position

    def blobs(self) -> Iterator[str]:
        """The names of the blobs that restored entries need."""
        yield from self.files
        yield from (task.blob for task in self.tasks.values() if task.blob)
        yield from (blob for batch in self.batches.values() if not batch.closed for blob in batch.blobs)


def read(archive: Archive, manifest: Manifest, since: JournalChanges | None, now: int, *, shift: bool) -> Plan:
    """Read a backup. `shift`: deadlines move. Blocks. Raises Damaged and OSError."""
    plan = Plan(manifest, since, now, max(0, now - manifest.began) if shift else 0)
    for number, segment in enumerate(manifest.segments):
        for at, entry in enumerate(archive.entries(segment)):
            _note(plan, (number, at), entry)
    _drop_tasks(plan)
    for batch_id, batch in list(plan.batches.items()):
        if batch.ends is not None and batch.ends <= now:
            del plan.batches[batch_id]
    _make_batches_whole(plan)
    _drop_files(plan)
    _drop_rows(plan)
    _settle_usage(plan)
    return plan


def _note(plan: Plan, position: EntryPosition, entry: Entry) -> None:
    kind = entry["kind"]
    match kind:
        case "task":
            plan.tasks[entry["id"]] = TaskFacts.of(position, entry)
        case "batch":
            ends = entry["at"] + entry["ttl"] if "ttl" in entry else None
            plan.batches[entry["id"]] = BatchFacts(position, entry["batch"], entry["refused"], entry["parts"], ends)
        case "file":
            plan.files[entry["id"]] = position, _number(str(entry["fields"].get("expires_at", "")))
        case "usage":
            plan.usage[entry["id"]] = entry["fields"]
        case "key":
            name = entry["name"]
            plan.others[name] = position
            if name.startswith(_ERASED):
                plan.erased.add(name.removeprefix(_ERASED))
            elif name.startswith(keys.account("")):
                plan.accounts[name] = dict(entry["value"])
            elif name in HASHES.values():
                plan.hashes[name] = entry["value"]
            elif name == keys.USAGE_FOLDED:
                plan.folded = entry["value"]
        case "row":
            plan.rows[entry["name"]] = RowFacts.of(position, entry["fields"])
        case "letter":
            plan.letters.append(entry["value"])
        case "weight":
            plan.weights[entry["tenant"]] = entry["weight"]


def is_erased(plan: Plan, name: str, created: int) -> bool:
    """Whether a task or file was deleted: its id may have been used again since."""
    at = None if plan.since is None else plan.since.erased.get(name)
    return name in plan.erased or (at is not None and at >= created)


def _drop_tasks(plan: Plan) -> None:
    for task_id, task in list(plan.tasks.items()):
        if is_erased(plan, task_id, task.created):
            plan.counts["erased"] += 1
        elif task.ends is not None and task.ends <= plan.now:
            plan.counts["over"] += 1
        elif task.batch and (task.batch not in plan.batches or plan.batches[task.batch].closed):
            plan.counts["lines of batches that are done"] += 1
        else:
            continue
        del plan.tasks[task_id]
    for task_id, task in list(plan.tasks.items()):
        if task.parent and task.parent not in plan.tasks:
            plan.counts["chunks of tasks that are not there"] += 1
            del plan.tasks[task_id]


def _make_batches_whole(plan: Plan) -> None:
    lines: dict[str, dict[int, str]] = {}
    for task_id, task in plan.tasks.items():
        if task.batch:
            lines.setdefault(task.batch, {})[task.line] = task_id
    for batch_id, batch in plan.batches.items():
        if batch.closed:
            continue
        here, written, line = lines.get(batch_id, {}), batch.count("written"), batch.count("line")
        refused = {int(number) for number in batch.refused}
        if not batch.ended:
            line = next(
                (number for number in range(written, line) if number not in here | dict.fromkeys(refused)), line
            )
        batch.line = line
        for number, task_id in here.items():
            if not written <= number < line:
                plan.counts["lines that are made again" if number >= line else "lines that are written"] += 1
                del plan.tasks[task_id]
        ends = Counter(plan.tasks[task_id].status for number, task_id in here.items() if written <= number < line)
        ended = sum(ends[status] for status in FINAL)
        batch.completed = batch.count("outputs") + ends["completed"]
        batch.failed = batch.count("errors") + ended - ends["completed"]
        batch.failed += sum(written <= number < line for number in refused)


def _drop_files(plan: Plan) -> None:
    for file_id, (_, ends) in list(plan.files.items()):
        erased = plan.since is not None and file_id in plan.since.erased
        if erased or (ends is not None and ends * 1000 <= plan.now):
            plan.counts["files that are gone"] += 1
            del plan.files[file_id]


def _drop_rows(plan: Plan) -> None:
    """Drop events of what has not happened: their tasks and batches end once more. And those of what is not there:
    erased, or accepted after the backup began."""
    for name, row in list(plan.rows.items()):
        task, batch = plan.tasks.get(row.task_id), plan.batches.get(row.object)
        if task is not None:
            holds = name in task.rows
        elif batch is not None:
            holds = row.type == f"batch.{batch.fields.get('status')}"
        else:
            erased = is_erased(plan, row.task_id, 0)
            holds = not erased and row.at * 1000 < plan.manifest.began
        if not holds:
            del plan.rows[name]


def _settle_usage(plan: Plan) -> None:
    """The rows of the ledger: those of the backup and of the journal, but for tasks that run again. What these used
    before is taken out of their accounts."""
    for row, fields in (plan.since.usage if plan.since is not None else {}).items():
        if row_id(row) > row_id(plan.folded):
            plan.usage.setdefault(row, fields)
    if plan.since is not None:
        for name, fields in plan.since.accounts.items():
            plan.accounts[name] = {**plan.accounts.get(name, {}), **fields}
    for row, fields in list(plan.usage.items()):
        task = plan.tasks.get(str(fields["id"]))
        if task is not None and not task.final:
            del plan.usage[row]
            _give_back(plan, task, row, fields)


def _give_back(plan: Plan, task: TaskFacts, row: str, fields: Mapping[str, Any]) -> None:
    """Take what a task used before out of its accounts: it runs again, and is charged then."""
    charge = charge_of(task)
    if charge is None:
        return
    prompt, cached, output = (int(fields[name]) for name in ("prompt", "cached", "output"))
    rates = charge.get("rates")
    money = 0 if not rates else -(-((prompt - cached) * rates[0] + cached * rates[1] + output * rates[2]) // 1000)
    ended = datetime.fromtimestamp(row_id(row)[0] / 1000, UTC)
    month = 12 * (ended.year - 1970) + ended.month - 1
    for name in charge["accounts"]:
        account = plan.accounts.get(name)
        if account is not None and _number(str(account.get("month", ""))) == month:
            account["spent"] = str(max(0, int(account.get("spent") or 0) - prompt - output))
            account["paid"] = str(max(0, int(account.get("paid") or 0) - money))


def charge_of(task: TaskFacts) -> dict[str, Any] | None:
    """The charge to a task's accounts: accounts, tokens, money, rates; None for nothing."""
    if not task.reserved:
        return None
    if task.reserved.isdigit():  # of an earlier release
        names = [keys.account(task.key)] if task.key else []
        return {"accounts": names, "tokens": int(task.reserved), "money": 0}
    return parsed(task.reserved) or None


def _number(text: str) -> int | None:
    try:
        return int(float(text)) if text else None
    except ValueError:
        return None


def row_id(row: str) -> tuple[int, ...]:
    return tuple(map(int, row.split("-")))
