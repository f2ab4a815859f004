"""The records of files: uploads, and what batches write. A file's bytes are the blob of its id.

    make:    note ─▶ blob committed, or joined ─▶ FILE_MADE
    remove:  FILE_REMOVED ─▶ blob deleted ─▶ forget
    read:    get ─▶ blobs.read(id, ...)

An upload begins with FILE_RESERVE: its bytes are reserved before they are taken, so that a tenant's files never have
more than its limit. FILE_MADE puts the file's bytes in their place. A reservation ends by itself LEASE_S after its last
renewal, so a gateway that dies keeps no room. `penstock:files:bytes:<tenant>` is the sum of the sizes in the tenant's
list: FILE_RESERVE adds it up if it is absent, FILE_MADE and FILE_REMOVED change it, and after a day it is added up
again. So a process of an earlier release, which counts nothing, makes it wrong for a day at most.

The notes (`penstock:files:notes`) name blobs that no file stands for: one that is about to be written, by the time of
the note, or one to be deleted, by 0. So whatever dies between two calls, a sweeper finds the blob: it deletes what is
noted by 0, or was noted NOTED_S ago. FILE_MADE then answers `late`: the maker begins again. Where there is a file, only
the note goes: it is of one who made the file once more, after a kill. A blob that is kept for a time without a file (a
result, a message's body) has a note by that time less NOTED_S.

    message's body (`producers.contract.message`): note, until BODY_KEPT_S from now ─▶ blob ─▶ the message is sent;
    each read notes it for BODY_KEPT_S more

Ids sort by the time at which they were made, so a list's cursor need not be there any more. Every call may raise
redis.exceptions.RedisError or OSError, and may be called again.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Self

import redis
from redis.asyncio import Redis

from producers.connection.script import Call, aexecute_many, arun, script, seconds, text
from producers.contract import keys
from producers.contract.keys import timed_id
from producers.contract.message import BodyGone, MessageTooLarge
from producers.errors import shown
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.protocol import NOTED_S as NOTED_S
from producers.store.protocol import PACKAGE
from producers.store.references import Places

PREFIX: Final = "file-"
#: Purposes that files may have: what is uploaded, and what a batch writes.
BATCH: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"
#: Time (s) for which an upload, or a batch's output, is kept, unless its request says otherwise.
KEPT_S: Final = 30 * 24 * 3600
#: Time (s) for which a reservation holds, unless it is renewed.
LEASE_S: Final = 600
#: Most uploads of one tenant at a time.
MAX_UPLOADS: Final = 64
#: Time (s) for which a body is kept from its last read on: SQS keeps a message for 14 days at most.
BODY_KEPT_S: Final = 15 * 24 * 3600
#: Names of such blobs: whoever may send a message could otherwise have any file read.
_BODY_NAME: Final = re.compile(r"message-[0-9a-f]{32}")
#: Pause (s) before a file is made again whose maker seemed dead to the sweeper.
LATE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class File:
    """A file. Times are unix seconds; `size` is bytes."""

    id: str
    size: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int | None = None
    tenant: str = ""
    status: str = "processed"

    @classmethod
    def parse(cls, file_id: str, raw: Mapping[Any, Any]) -> Self:
        fields = {text(name): text(value) for name, value in raw.items()}
        return cls(
            file_id,
            int(fields["size"]),
            fields["filename"],
            fields["purpose"],
            int(fields["created_at"]),
            int(fields["expires_at"]) if "expires_at" in fields else None,
            fields.get("tenant", ""),
            fields["status"],
        )

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


def new_id(ms: int, seed: str | None = None) -> str:
    """An id for a file, made at unix time `ms`.

    `seed`: such as `<batch id>:output`, with a time that the batch has written down: who goes on after a kill then
    makes the same file.
    """
    return timed_id(PREFIX, ms, seed)


async def note(store: Redis, file_id: str) -> None:
    """Note that the blob is about to be committed, or joined. Not needed while parts are written, or an upload comes
    in: what dies then is the Blobs' to clean, or the batch's."""
    await store.zadd(keys.FILE_NOTES, {file_id: int(time.time())}, nx=True)


@dataclass(frozen=True, slots=True)
class Room:
    """FILE_RESERVE's answer. `reached`: the limit that keeps the upload off, `bytes`, `files` or `uploads`; None: it is
    reserved. `used`: what the tenant has of it, with what other uploads have reserved."""

    reached: str | None
    used: int = 0


def reserve(upload: str, tenant: str, size: int, max_bytes: int | None, max_files: int | None) -> Call:
    """FILE_RESERVE: reserve `size` bytes for an upload, in the place of what it has reserved, if the tenant's limits
    (None: any number) allow it; `read_room` reads the answer."""
    names = keys.files(tenant), keys.file_bytes(tenant), keys.uploads(tenant)
    limits = (-1 if limit is None else limit for limit in (max_bytes, max_files, MAX_UPLOADS))
    return Call(script(PACKAGE, "file_reserve"), names, (upload, size, LEASE_S, *limits))


def read_room(answer: Sequence[Any]) -> Room:
    outcome, used = text(answer[0]), int(answer[1])
    return Room(None if outcome == "reserved" else outcome, used)


async def release(store: Redis, upload: str, tenant: str) -> None:
    """Give up what an upload has reserved."""
    await store.execute_command("HDEL", keys.uploads(tenant), upload)


def file_made(file: File, upload: str = "") -> Call:
    """FILE_MADE: make the file, whose blob was noted and is there, in the place of what `upload` has reserved. Answers
    `made`, `exists` (also by this call) or `late`: the sweeper removes the blob, so note and write it again in a
    moment."""
    fields = asdict(file) | {"id": None, "tenant": file.tenant or None}
    pairs = [part for name, value in fields.items() if value is not None for part in (name, value)]
    names = (*_keys(file.id, file.tenant, file.purpose), keys.uploads(file.tenant))
    return Call(script(PACKAGE, "file_made"), names, (file.id, file.expires_at or 0, upload, *pairs))


async def make(store: Redis, draft: File, write: Callable[[], int], kept_s: int | None = None) -> None:
    """Make the file, whose blob `write` makes: it blocks, may be called again, and returns the size.

    `kept_s`: the time for which the file is kept once it is there, else until `draft` says.
    """
    while True:
        await note(store, draft.id)
        file = replace(draft, size=await asyncio.to_thread(write))
        if kept_s is not None:
            file = replace(file, expires_at=int(seconds(await store.time())) + kept_s)
        if text(await arun(store, file_made(file))) != "late":
            return
        await asyncio.sleep(LATE_S)


async def get(store: Redis, file_id: str) -> File | None:
    """The file; None if there is none, or it has expired."""
    raw = await store.hgetall(keys.file(file_id))
    file = File.parse(file_id, raw) if raw else None
    return None if file is None or file.expired(time.time()) else file


async def listed(
    store: Redis,
    *,
    tenant: str = "",
    purpose: str | None = None,
    after: str | None = None,
    limit: int,
    newest_first: bool = True,
) -> list[File]:
    """Up to `limit` files of the tenant, or of none, by the time at which they were made.

    `after`: those after this file, which may be gone.
    """
    name = keys.files(tenant, purpose) if purpose else keys.files(tenant)
    result: list[File] = []
    while len(result) < limit:
        ids = await _page(store, name, after, limit - len(result), newest_first)
        if not ids:
            break
        after = ids[-1]
        rows = await aexecute_many(store, [("HGETALL", keys.file(file_id)) for file_id in ids])
        files = [File.parse(file_id, raw) for file_id, raw in zip(ids, rows, strict=True) if raw]
        result += [file for file in files if not file.expired(time.time())]
    return result


def removed(file_id: str, tenant: bytes | str | None, purpose: bytes | str | None, noted_by: int | None = None) -> Call:
    """FILE_REMOVED: forget the file, and note that its blob is to be deleted. Answers 1, or 0 if there was none.

    `noted_by`: do it only if the blob was noted by then (unix s), else answer -1.
    """
    names = _keys(file_id, text(tenant or b""), text(purpose or b""))
    return Call(script(PACKAGE, "file_removed"), names, (file_id, "" if noted_by is None else noted_by))


async def remove(store: Redis, blobs: Blobs, file_id: str) -> bool:
    """Remove a file, expired or not, or a blob that was noted; with its blob. False if there was no file."""
    tenant, purpose = await store.hmget(keys.file(file_id), "tenant", "purpose")
    there = await arun(store, removed(file_id, tenant, purpose))
    await _delete(store, blobs, file_id)
    return bool(there)


async def left_behind(store: Redis, limit: int) -> list[str]:
    """Names of noted blobs to be removed: of dead writers, of removed files and results, or kept until now."""
    return await _until(store, keys.FILE_NOTES, _noted_by(), limit)


async def remove_left_behind(store: Redis, blobs: Blobs, name: str) -> bool:
    """Remove a blob that `left_behind` named. False if it was noted again, or became a file, meanwhile."""
    tenant, purpose = await store.hmget(keys.file(name), "tenant", "purpose")
    done = await arun(store, removed(name, tenant, purpose, _noted_by()))
    if done != -1:
        await _delete(store, blobs, name)
    return bool(done != -1)


async def _delete(store: Redis, blobs: Blobs, name: str) -> None:
    await asyncio.to_thread(blobs.delete, name)
    await store.zrem(keys.FILE_NOTES, name)


def _noted_by() -> int:
    """The time (unix s) by which notes of blobs that are to be removed were made."""
    return int(time.time()) - NOTED_S


async def expired(store: Redis, limit: int) -> list[str]:
    """Ids of files whose end has come, the oldest first."""
    return await _until(store, keys.FILES_EXPIRING, int(time.time()), limit)


async def _until(store: Redis, name: str, end: int, limit: int) -> list[str]:
    ids = await store.zrange(name, "-inf", end, byscore=True, offset=0, num=limit)
    return [text(file_id) for file_id in ids]


async def _page(store: Redis, name: str, after: str | None, count: int, newest_first: bool) -> list[str]:
    """Ids of a list, in order, from the one after `after` on."""
    if newest_first:
        ids = await store.zrange(name, f"({after}" if after else "+", "-", desc=True, bylex=True, offset=0, num=count)
    else:
        ids = await store.zrange(name, f"({after}" if after else "-", "+", bylex=True, offset=0, num=count)
    return [text(file_id) for file_id in ids]


def _keys(file_id: str, tenant: str, purpose: str) -> tuple[str, ...]:
    lists = (keys.files(tenant), keys.files(tenant, purpose))
    return keys.file(file_id), *lists, keys.FILES_EXPIRING, keys.FILE_NOTES, keys.file_bytes(tenant)


class MessageBlobs:
    """Message bodies as blobs. `location`: the folder or bucket that all processes share; None: there is none."""

    def __init__(self, store: redis.Redis, location: str | None) -> None:
        self._store = store
        self._places = Places(location)

    def put(self, body: bytes) -> Mapping[str, str]:
        if (blobs := self._blobs()) is None:
            raise MessageTooLarge(f"a message's body has {len(body)} bytes: it needs --files-dir")
        name = f"message-{secrets.token_hex(16)}"
        self._store.zadd(keys.FILE_NOTES, {name: _due()})
        with blobs.writer(name) as writer:
            writer.write(body)
            writer.commit()
        return {"name": name}

    def get(self, reference: Mapping[str, str]) -> bytes:
        name = str(reference.get("name"))
        if not _BODY_NAME.fullmatch(name):
            raise BodyGone(f"the message's body is gone: {shown(name)} names none")
        if (blobs := self._blobs()) is None:
            raise BodyGone("the message's body is in a file: this process needs --files-dir")
        try:
            body = blobs.read(name, 0, blobs.size(name))
        except BlobNotFound as error:
            raise BodyGone(f"the message's body is gone: {error}") from error
        self._store.zadd(keys.FILE_NOTES, {name: _due()}, xx=True, gt=True)
        return body

    def _blobs(self) -> Blobs | None:
        return None if self._places.location is None else self._places.at(self._places.location)


def _due() -> int:
    """The time of a note (unix s) that the sweeper obeys BODY_KEPT_S from now."""
    return int(time.time()) + BODY_KEPT_S - NOTED_S
