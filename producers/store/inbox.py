"""Objects of inboxes: each becomes a batch, and the batch's results go to an outbox (`producers.sources.files`).

    INBOX_TAKE ─▶ open: input copied, batch made, batch ended, results written ─▶ INBOX_DONE

A **place** is a bucket or a folder that has an inbox and an outbox. An object is known by its place, its name and its
**stamp**, which changes with its content. So an object that is reported twice is one batch. The id of the batch is
written down before the batch is made: a process that goes on after a kill makes the same things.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import Call, aexecute_many, script, text
from producers.contract import keys
from producers.store import batches
from producers.store.protocol import PACKAGE

#: Time (s) for which an object is known after it was last reported.
KNOWN_S: Final = batches.KEPT_S
#: The field of the known objects of a name that has the batch of the last one.
_NEWEST: Final = "newest"


@dataclass(frozen=True, slots=True)
class InboxObject:
    """An object of an inbox. `name`: its path below the inbox. `stamp`: changes with its content. `size`: bytes."""

    name: str
    stamp: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An open object. `id`: that of its batch, which may be yet to be made. `at`: when it was taken (unix ms)."""

    id: str
    at: int
    object: InboxObject

    def to_json(self) -> str:
        return json.dumps({"at": self.at, **asdict(self.object)})

    @classmethod
    def parse(cls, batch_id: str, raw: str) -> Entry:
        fields: dict[str, Any] = json.loads(raw)
        return cls(batch_id, fields.pop("at"), InboxObject(**fields))


def new_entry(location: str, object: InboxObject, at: int) -> Entry:
    """An entry for an object that is found at unix time `at` (ms)."""
    return Entry(batches.new_id(at, f"{location}\n{object.name}\n{object.stamp}"), at, object)


def take(location: str, entry: Entry) -> Call:
    """INBOX_TAKE: open the object. Answers `[1, batch id]`, or `[0, batch id]` for one that was known."""
    names = (keys.inbox(location), _known_key(location, entry.object.name))
    return Call(script(PACKAGE, "inbox_take"), names, (entry.object.stamp, entry.id, entry.to_json(), KNOWN_S))


def done(location: str, entry: Entry, *, forget: bool) -> Call:
    """INBOX_DONE: nothing is left to do for it. `forget`: it has left the inbox, so it may come again."""
    names = (keys.inbox(location), _known_key(location, entry.object.name))
    return Call(script(PACKAGE, "inbox_done"), names, (entry.object.stamp, entry.id, int(forget)))


def hold(entry: Entry, process: str, ms: int) -> Call:
    """LEAD: one process works on the object. Answers 0, or the ms left of another's lease."""
    return Call(script(PACKAGE, "lead"), (keys.inbox_lease(entry.id),), (process, ms))


def let_go(entry: Entry, process: str) -> Call:
    """RESIGN: another process may work on it at once."""
    return Call(script(PACKAGE, "resign"), (keys.inbox_lease(entry.id),), (process,))


async def open_entries(store: Redis, location: str) -> list[tuple[Entry, str | None]]:
    """The place's open objects, the oldest first, each with the status of its batch; None before that is made."""
    entries = [Entry.parse(text(name), text(raw)) for name, raw in (await store.hgetall(keys.inbox(location))).items()]
    entries.sort(key=lambda entry: entry.id)
    statuses = await aexecute_many(store, [("HGET", keys.batch(entry.id), "status") for entry in entries])
    return [(entry, text(raw) if raw else None) for entry, raw in zip(entries, statuses, strict=True)]


async def is_open(store: Redis, location: str, entry: Entry) -> bool:
    """Whether something is left to do for the object."""
    return bool(await store.hexists(keys.inbox(location), entry.id))


async def is_newest(store: Redis, location: str, entry: Entry, there: InboxObject | None) -> bool:
    """Whether no later content has the same name. `there`: what has the name in the inbox now.

    What is there is the latest, and is noted as such. Without it the last one that was noted, or taken, is.
    """
    name = _known_key(location, entry.object.name)
    if there is None:
        last = await store.hget(name, _NEWEST)
        return last is None or text(last) == entry.id
    if there == entry.object:
        async with store.pipeline(transaction=True) as pipe:
            pipe.hset(name, _NEWEST, entry.id)
            pipe.expire(name, KNOWN_S)
            await pipe.execute()
    return there == entry.object


def _known_key(location: str, name: str) -> str:
    return keys.inbox_known(hashlib.sha256(f"{location}\n{name}".encode()).hexdigest())
