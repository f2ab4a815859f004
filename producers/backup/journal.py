"""The journal: what must not come back with a backup, kept outside the store from moment to moment.

    the leading sweeper ─▶ keep: new in audit logs, `erasing` and ledger ─▶ a file ─▶ the positions, in the store
    restore ─▶ read: what came since the backup began

A file has a name of its own, `journal-EPOCH-MS-RANDOM`, and lines of JSON. Each has a current value, or an event
of an id, so that it may be there twice, and of two the later one counts:

| `kind` | fields beside `at` (server time, ms) |
| --- | --- |
| `begins` | from now on all is kept; nothing is known of the time before |
| `here` | nothing is new: the journal is kept |
| `gap` | `what`: something may be missing from before |
| `erased` | `id` of a task, or of a file |
| `field` | `name` of a hash (API keys, tenants' limits, webhook endpoints), `field`, `value` (null: it was removed) |
| `usage` | `id`, `fields` of a row of the ledger |
| `account` | `name`, `fields`: what is spent of it in its month |

What dies between two calls: after a file and before the positions, the next leader writes the same once more. FOLD and
the end of an erasure wait for `keep`, so that nothing leaves the store that is not in the journal.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from producers.backup import sealed
from producers.backup.archive import Entry, Manifest, encode, line, parse
from producers.backup.sealed import Damaged
from producers.connection.script import aexecute_many, ms, parsed, text
from producers.contract import keys
from producers.contract.sealing import Keyring
from producers.store import epoch
from producers.store.blobs import Blobs

#: Time (s) between two looks at what is new.
EVERY_S: Final = 2.0
#: Time (s) after which a file is written though nothing is new: so a restore knows that nothing was.
HERE_S: Final = 60.0
#: Time (ms) before a backup's beginning from which on files count for it.
MARGIN_MS: Final = int(2 * HERE_S * 1000)
#: Entries of a log that are read at a time.
PAGE: Final = 1000
PREFIX: Final = "journal-"
#: The epoch's part of a file's name if there is none.
_NONE: Final = "0"
#: Beginning of a change's name in the audit logs -> the hash that it changed.
HASHES: Final = {
    "key": keys.API_KEYS,
    "endpoint": keys.WEBHOOK_ENDPOINTS,
    "tenant": keys.TENANT_LIMITS,
}
_LOGS: Final = (keys.AUDIT, keys.AUDIT_ENDPOINTS)
_SPENT: Final = ("month", "spent", "paid")


class Journal:
    """Keeps the journal of one system. One for a process."""

    def __init__(self, store: Redis, blobs: Blobs, ring: Keyring) -> None:
        self._store, self._blobs, self._ring = store, blobs, ring
        self._turn = asyncio.Lock()
        self._erased: set[str] = set()
        self._wrote = float("-inf")

    async def keep(self) -> int:
        """Write new entries. Returns their number. Raises redis errors and OSError."""
        async with self._turn:
            entries, positions = await self._new()
            if not entries and time.monotonic() - self._wrote < HERE_S:
                return 0
            now = ms(await self._store.time())
            lines = [line({"at": now, **entry}) for entry in entries or [{"kind": "here"}]]
            name = f"{PREFIX}{await epoch.aread(self._store) or _NONE}-{now:013d}-{secrets.token_hex(4)}"
            await asyncio.to_thread(sealed.write, self._blobs, name, lines, self._ring)
            self._wrote = time.monotonic()
            if positions:
                await aexecute_many(
                    self._store, [("HSET", keys.JOURNAL, *(part for item in positions.items() for part in item))]
                )
            self._erased |= {entry["id"] for entry in entries if entry["kind"] == "erased"}
            return len(entries)

    async def _new(self) -> tuple[list[Entry], dict[str, str]]:
        """The new entries, and the positions behind them."""
        raw, folded, erasing = await aexecute_many(
            self._store,
            [
                ("HGETALL", keys.JOURNAL),
                ("GET", keys.USAGE_FOLDED),
                ("ZRANGE", keys.ERASING, 0, -1, "WITHSCORES"),
            ],
        )
        before = {text(name): text(value) for name, value in raw.items()}
        entries: list[Entry] = []
        if not before:
            entries.append({"kind": "begins"})
            before = await self._ends()
        elif folded is not None and _id(text(folded)) > _id(before[keys.LEDGER]):
            entries.append({"kind": "gap", "what": "usage was added to sums while no journal was kept"})
        now = dict(before)
        for log in _LOGS:
            entries += await self._changes(log, now)
        erased = dict(zip(map(text, erasing[::2]), erasing[1::2], strict=True))
        self._erased &= erased.keys()
        entries += [
            {"kind": "erased", "id": name, "at": int(float(at))}
            for name, at in erased.items()
            if name not in self._erased
        ]
        entries += await self._usage(now)
        return entries, now if now != before or entries else {}

    async def _ends(self) -> dict[str, str]:
        """The positions behind the last rows of the logs."""
        logs = (*_LOGS, keys.LEDGER)
        last = await aexecute_many(self._store, [("XREVRANGE", log, "+", "-", "COUNT", 1) for log in logs])
        return {log: text(page[0][0]) if page else "0-0" for log, page in zip(logs, last, strict=True)}

    async def _changes(self, log: str, positions: dict[str, str]) -> list[Entry]:
        """The changed fields, with their current values."""
        changed: dict[tuple[str, str], None] = {}
        async for row, fields in self._rows(log, positions[log]):
            positions[log] = row
            for raw in fields.values():
                change = parsed(raw)
                kind, subject = str(change.get("did")).partition(".")[0], change.get("what")
                if kind in HASHES and isinstance(subject, str):
                    changed[HASHES[kind], subject] = None
        if not changed:
            return []
        values = await aexecute_many(self._store, [("HGET", name, subject) for name, subject in changed])
        return [
            {"kind": "field", "name": name, "field": subject, "value": None if value is None else encode(value)}
            for (name, subject), value in zip(changed, values, strict=True)
        ]

    async def _usage(self, positions: dict[str, str]) -> list[Entry]:
        """The new rows of the ledger, and the current sums of their accounts."""
        entries: list[Entry] = []
        accounts: set[str] = set()
        async for row, fields in self._rows(keys.LEDGER, positions[keys.LEDGER]):
            positions[keys.LEDGER] = row
            entries.append({"kind": "usage", "id": row, "fields": encode(fields)})
            key, tenant = fields.get(b"key"), fields.get(b"tenant")
            accounts |= {keys.account(text(key))} if key else set()
            accounts |= {keys.account(f"tenant:{text(tenant)}")} if tenant else set()
        names = sorted(accounts)
        stand = await aexecute_many(self._store, [("HMGET", name, *_SPENT) for name in names])
        for name, values in zip(names, stand, strict=True):
            if values[0] is not None:
                entries.append(
                    {"kind": "account", "name": name, "fields": encode(dict(zip(_SPENT, values, strict=True)))}
                )
        return entries

    async def _rows(self, log: str, after: str) -> AsyncIterator[tuple[str, Mapping[bytes, bytes]]]:
        """The rows of a log behind one, oldest first."""
        while True:
            (page,) = await aexecute_many(self._store, [("XRANGE", log, f"({after}", "+", "COUNT", PAGE)])
            for row, fields in page:
                yield text(row), fields
            if len(page) < PAGE:
                return
            after = text(page[-1][0])


@dataclass(slots=True)
class JournalChanges:
    """The journal's entries since a backup began. Times are server milliseconds.

    `covers`: it was kept from the backup's beginning on, without a gap. `until`: its last entry.
    """

    covers: bool = False
    until: int = 0
    gaps: list[str] = field(default_factory=list)
    erased: dict[str, int] = field(default_factory=dict)
    """Id of a task or file -> when it was deleted."""
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a hash -> field -> its value, or None."""
    usage: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    accounts: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def read(blobs: Blobs, ring: Keyring, epoch_id: str, began: int) -> JournalChanges:
    """The entries since a backup of this epoch began. Blocks. Raises Damaged and OSError.

    A file that was written in the minutes before counts, too: its entries are true, or repeated later.
    """
    prefix = f"{PREFIX}{epoch_id or _NONE}-"
    since = JournalChanges()
    for name in sorted(blobs.names(prefix)):
        at = _time_of(name, prefix)
        if at < began - MARGIN_MS:
            continue
        since.covers = since.covers or at <= began + MARGIN_MS
        since.until = max(since.until, at)
        for entry in parse(sealed.read(blobs, name, ring)):
            _take(since, entry, began)
    if since.gaps:
        since.covers = False
    return since


@dataclass(frozen=True, slots=True)
class Pruned:
    """Files of a journal that were removed, and those that are left. `first`: when the oldest of these was written
    (server ms); None without any."""

    removed: int
    remaining: int
    first: int | None


def prune(blobs: Blobs, kept: Sequence[Manifest], *, dry_run: bool = False) -> Pruned:
    """Remove the files that no backup needs: those of `kept` read others, and a backup that begins from now on, too.
    Blocks. Raises OSError, and ValueError where none of the backups has ended.

    A backup needs the files of its epoch from MARGIN_MS before its beginning on (`read`), also while it has not ended:
    it goes on with the same beginning. What was written since the last whole backup began stays, of any epoch. The
    oldest go first, so that one that is killed leaves no gap. Names that are no journal's stay.
    """
    whole = [manifest.began for manifest in kept if manifest.ended]
    if not whole:
        raise ValueError("none of the backups that are kept has ended: nothing holds what the journal says")
    needed: dict[str, int] = {}
    for manifest in kept:
        name = manifest.epoch or _NONE
        needed[name] = min(manifest.began, needed.get(name, manifest.began))
    removed, remaining = 0, []
    for at, epoch_id, name in sorted(_files(blobs)):
        if at < min(max(whole), needed.get(epoch_id, max(whole))) - MARGIN_MS:
            removed += 1
            if not dry_run:
                blobs.delete(name)
        else:
            remaining.append(at)
    return Pruned(removed, len(remaining), min(remaining, default=None))


def _files(blobs: Blobs) -> Iterator[tuple[int, str, str]]:
    """When each file was written (server ms), its epoch, its name."""
    for name in blobs.names(PREFIX):
        epoch_id, *parts = name.removeprefix(PREFIX).split("-")
        if len(parts) == 2 and parts[0].isdigit():
            yield int(parts[0]), epoch_id, name


def _take(since: JournalChanges, entry: Entry, began: int) -> None:
    match entry["kind"]:
        case "begins" if entry["at"] > began:
            since.gaps.append("it begins after the backup, or began anew")
        case "gap" if entry["at"] > began:
            since.gaps.append(entry["what"])
        case "erased":
            since.erased[entry["id"]] = max(entry["at"], since.erased.get(entry["id"], 0))
        case "field":
            since.fields.setdefault(entry["name"], {})[entry["field"]] = entry["value"]
        case "usage":
            since.usage[entry["id"]] = entry["fields"]
        case "account":
            since.accounts[entry["name"]] = entry["fields"]


def _time_of(name: str, prefix: str) -> int:
    """The time in a file's name. Raises Damaged."""
    stamp = name.removeprefix(prefix).partition("-")[0]
    if not stamp.isdigit():
        raise Damaged(f"{name} is no file of a journal")
    return int(stamp)


def _id(row: str) -> tuple[int, ...]:
    return tuple(map(int, row.split("-")))
