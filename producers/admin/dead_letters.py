"""Lists, replays and removes dead letters: tasks that were given up and messages that no worker could use.

    letters(client), page, find -> Letter -> replay: a new task, or the message onto its list again;  purge: removed

A task that was given up is final, and its callers have its error: a replay submits it again under another id. That id
is made of the letter, so that a replay that was broken off between the submit and the purge is not done twice.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import ResponseError

from producers.broker.base import NoSuchList
from producers.client.aio import AsyncClient
from producers.client.operations import repeated_fields, task_of_record
from producers.connection.script import parsed
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.contract.message import id_of, is_plain
from producers.contract.record import Record
from producers.errors import PenstockError, TaskExists, TokenizerChanged

#: Dead letters read at a time, unless they are large.
PAGE: Final = 200
#: Bytes of dead letters from which on fewer are read at a time: any sender may have written megabytes into one.
LARGE: Final = 1 << 20
_SPACE: Final = uuid.UUID("5b7c2f0e-6c39-4f0c-9d0f-0d6b1f3f6a11")


class BrokenRecord(PenstockError):
    """The task's record is unreadable, which may be the reason for the dead letter."""


class NotReplayed(PenstockError):
    """The dead letter was not replayed and stays. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter. `raw`: its entry in the list. `message`: the broker's message. `task_id`: None if unknown."""

    raw: str
    reason: str
    list_name: str
    at_ms: int
    message: str
    task_id: str | None

    @classmethod
    def parse(cls, entry: bytes | str) -> Letter:
        """Parse an entry. An unreadable one gives a letter, too."""
        # A message may be any bytes: surrogates keep those that are not UTF-8, in both directions.
        raw = entry if isinstance(entry, str) else entry.decode(errors="surrogateescape")
        try:
            fields = json.loads(raw)
            message = str(fields["message"])
            return cls(raw, str(fields["reason"]), str(fields["list"]), int(fields["at"]), message, _task_id(message))
        except (ValueError, OverflowError, RecursionError, KeyError, TypeError):
            return cls(raw, "not an entry of this list", "", 0, raw, None)

    @property
    def key(self) -> str:
        """The letter's key: 12 hexadecimal digits of the entry's SHA-256."""
        return self.digest[:12]

    @property
    def digest(self) -> str:
        return hashlib.sha256(_bytes(self.raw)).hexdigest()


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay's outcome. `task_id`: the task that runs now, if known. `new_task`: it is a new task with a new id."""

    task_id: str | None
    new_task: bool


async def letters(client: AsyncClient) -> AsyncIterator[Letter]:
    """All dead letters, oldest first. Raises redis.exceptions.RedisError or OSError."""
    async for raw in _entries(client, 0):
        yield Letter.parse(raw)


async def page(client: AsyncClient, start: int, limit: int, max_bytes: int) -> list[Letter]:
    """Up to `limit` dead letters from the index `start` on, oldest first; fewer where they have more than `max_bytes`
    bytes together, but the first in any case. Raises redis.exceptions.RedisError or OSError."""
    letters, size = list[Letter](), 0
    async for raw in _entries(client, start, limit):
        size += len(raw)
        if letters and size > max_bytes:
            break
        letters.append(Letter.parse(raw))
    return letters


async def find(client: AsyncClient, key: str, index: int | None = None) -> Letter | None:
    """The dead letter with this key, or None. `index`: where it was in the list, to be looked at first: without it, or
    where it has moved far, all letters before it are read. Raises redis.exceptions.RedisError or OSError."""
    nearby = [] if index is None else [(max(0, index - PAGE + 1), PAGE)]
    for start, limit in (*nearby, (0, None)):
        async for raw in _entries(client, start, limit):
            if hashlib.sha256(raw).hexdigest().startswith(key):
                return Letter.parse(raw)
    return None


async def _entries(client: AsyncClient, start: int, limit: int | None = None) -> AsyncIterator[bytes]:
    """Entries of the list, read in pages of about LARGE bytes at most."""
    end, count = None if limit is None else start + limit, 8
    while end is None or start < end:
        count = count if end is None else min(count, end - start)
        entries = await client.broker.letters(start, count)
        for entry in entries:
            yield entry
        start += len(entries)
        if len(entries) < count:
            return
        count = min(PAGE, 4 * count) if sum(map(len, entries)) < LARGE // 4 else max(1, count // 4)


async def record_of(client: AsyncClient, letter: Letter) -> Record | None:
    """The task's record, with the workers that died on it (`lost`); None if it has expired. Raises BrokenRecord."""
    if letter.task_id is None:
        return None
    try:
        raw = await client.store.hgetall(keys.task(letter.task_id))
        if not raw:
            return None
        record = Record.parse(letter.task_id, raw)
        for name in ("error", "lost", "task"):
            record.json(name)
        if "status" not in record.fields:
            raise ValueError("it has no status")
    except (ResponseError, ValueError) as error:  # another type, not text, or not JSON
        if trouble(error) is not None:
            raise
        raise BrokenRecord(f"the record of task {letter.task_id} cannot be used ({error}); purge the letter") from error
    return record


async def replay(client: AsyncClient, letter: Letter) -> Replayed:
    """Replay a dead letter. A task's timeout counts from now.

    Raises NotReplayed, BrokenRecord, producers.errors.InvalidTask (the model is gone, or other) and SubmitFailed.
    """
    record = await record_of(client, letter)
    message = _decoded(letter.message)
    if record is None and message is not None and not is_plain(message["headers"]):
        raise NotReplayed("its record is past its time to live, so that nobody knows what was asked; purge it")
    if record is None or not record.final:
        return await _send(client, letter, letter.message, letter.task_id)
    error = record.json("error")
    if not isinstance(error, dict) or error.get("code") != "dead_lettered":
        if record.status == "cancelled":
            raise NotReplayed(f"task {record.id} was cancelled; submit it anew if you want its output, else purge it")
        raise NotReplayed(
            f"task {record.id} ended {record.status}, only what Celery was to do afterwards failed; submit it anew if "
            "you want another output, else purge it"
        )
    again = str(uuid.uuid5(_SPACE, f"{record.id} {record.fields.get('created')}"))  # of two letters, too
    if not record.plain:
        task = task_of_record(record)
        try:
            with suppress(TaskExists):  # an interrupted replay submitted it before
                await client.admit(task, again, {**repeated_fields(record, task), "retried_from": record.id})
        except TokenizerChanged as error:
            if not await client.store.exists(keys.task(again)):
                version = record.fields.get("version")
                raise NotReplayed(f"{error}, or publish version {version} again and replay it then") from None
        await purge(client, letter)
        return Replayed(again, new_task=True)
    if message is None:
        raise NotReplayed("its message cannot be decoded; purge it")
    message["headers"] |= {"id": again, "root_id": again}
    message["properties"] |= {"correlation_id": again, "delivery_tag": str(uuid.uuid4())}
    await _send(client, letter, json.dumps(message), again)
    return Replayed(again, new_task=True)


async def purge(client: AsyncClient, letter: Letter) -> bool:
    """Remove a dead letter. Returns False if it no longer exists."""
    return await client.broker.remove_letter(_bytes(letter.raw))


async def _send(client: AsyncClient, letter: Letter, message: str, task_id: str | None) -> Replayed:
    if not letter.list_name:
        raise NotReplayed("nothing says to which list it belongs; purge it")
    try:
        sent = await client.broker.replay(_bytes(letter.raw), letter.list_name, _bytes(message), task_id or "")
    except NoSuchList as error:
        raise NotReplayed(f"{error}; purge it") from error
    if not sent:
        raise NotReplayed("somebody else has taken it off the list")
    return Replayed(task_id, new_task=False)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _decoded(message: str) -> dict[str, Any] | None:
    """The parsed message, if it has the parts of a task message; else None."""
    envelope = parsed(message)
    whole = isinstance(envelope.get("headers"), dict) and isinstance(envelope.get("properties"), dict)
    return envelope if whole else None


def _task_id(message: str) -> str | None:
    envelope = _decoded(message)
    return id_of(envelope["headers"]) if envelope else None
