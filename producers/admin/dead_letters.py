"""Dead letters, for whoever minds them: messages that no worker could use, and tasks that were given up.

    letters(client) -> Letter -> replay: a new task, or the message onto its list again;  purge: off the list

A task that was given up is final, and whoever waited for it was told: it is asked for anew, under another id. That id
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

from producers.broker.base import NoSuchPlace
from producers.client.aio import AsyncClient
from producers.connection.trouble import trouble
from producers.contract import keys
from producers.contract.message import id_of, is_plain
from producers.contract.record import Record
from producers.contract.task import Task
from producers.errors import PenstockError, TaskExists

#: Letters read in one go.
PAGE: Final = 200
_SPACE: Final = uuid.UUID("5b7c2f0e-6c39-4f0c-9d0f-0d6b1f3f6a11")


class BrokenRecord(PenstockError):
    """The task's record is none. It may be why the letter is here."""


class NotReplayed(PenstockError):
    """The letter stays where it is. The message says why, and what can be done."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One entry of the list, `raw`. `message` is what the broker carried, `task_id` what it names, if it does."""

    raw: str
    reason: str
    list_name: str
    at_ms: int
    message: str
    task_id: str | None

    @classmethod
    def parse(cls, entry: bytes | str) -> Letter:
        """Also of an entry that is none."""
        # A message may be any bytes: what is not UTF-8 comes through both ways.
        raw = entry if isinstance(entry, str) else entry.decode(errors="surrogateescape")
        try:
            said = json.loads(raw)
            message = str(said["message"])
            return cls(raw, str(said["reason"]), str(said["list"]), int(said["at"]), message, _task_id(message))
        except (ValueError, RecursionError, KeyError, TypeError):
            return cls(raw, "not an entry of this list", "", 0, raw, None)

    @property
    def key(self) -> str:
        """What names it: 12 hexadecimal digits of the entry's SHA-256."""
        return self.digest[:12]

    @property
    def digest(self) -> str:
        return hashlib.sha256(_bytes(self.raw)).hexdigest()


@dataclass(frozen=True, slots=True)
class Replayed:
    """`task_id` is the task that runs now, if it has an id; `anew`: it is another than the one that was given up."""

    task_id: str | None
    anew: bool


async def letters(client: AsyncClient) -> AsyncIterator[Letter]:
    """All of them, oldest first. Raises redis.exceptions.RedisError or OSError."""
    start = 0
    while page := await client.broker.letters(start, PAGE):
        for raw in page:
            yield Letter.parse(raw)
        start += PAGE


async def record_of(client: AsyncClient, letter: Letter) -> Record | None:
    """The task's record, with who was lost with it (`lost`); None where there is none any more. Raises BrokenRecord."""
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
    except (ResponseError, ValueError) as error:  # of another type; no text; no JSON
        if trouble(error) is not None:
            raise
        raise BrokenRecord(f"the record of task {letter.task_id} cannot be used ({error}); purge the letter") from error
    return record


async def replay(client: AsyncClient, letter: Letter) -> Replayed:
    """Ask for it once more. A task's timeout counts from now.

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
        raise NotReplayed(
            f"task {record.id} ended {record.status}, only what Celery was to do afterwards failed; submit it anew if "
            "you want another output, else purge it"
        )
    again = str(uuid.uuid5(_SPACE, letter.digest))
    if not record.plain:
        with suppress(TaskExists):  # by a replay that was broken off here
            await client.submit(Task.parse(record.json("task") or {}), task_id=again)
        await purge(client, letter)
        return Replayed(again, anew=True)
    if message is None:
        raise NotReplayed("its message cannot be decoded; purge it")
    message["headers"] |= {"id": again, "root_id": again}
    message["properties"] |= {"correlation_id": again, "delivery_tag": str(uuid.uuid4())}
    await _send(client, letter, json.dumps(message), again)
    return Replayed(again, anew=True)


async def purge(client: AsyncClient, letter: Letter) -> bool:
    """False where it is not there any more."""
    return await client.broker.remove_letter(_bytes(letter.raw))


async def _send(client: AsyncClient, letter: Letter, message: str, task_id: str | None) -> Replayed:
    if not letter.list_name:
        raise NotReplayed("nothing says to which list it belongs; purge it")
    try:
        sent = await client.broker.replay(_bytes(letter.raw), letter.list_name, _bytes(message), task_id or "")
    except NoSuchPlace as error:
        raise NotReplayed(f"{error}; purge it") from error
    if not sent:
        raise NotReplayed("somebody else has taken it off the list")
    return Replayed(task_id, anew=False)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _decoded(message: str) -> dict[str, Any] | None:
    """A message whose parts are where they should be."""
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and isinstance(found.get("headers"), dict) and isinstance(found.get("properties"), dict):
        return found
    return None


def _task_id(message: str) -> str | None:
    found = _decoded(message)
    return id_of(found["headers"]) if found else None
