"""Receives an upload: a form with one file, which goes to a blob as it comes.

room for what the request declares ─▶ pieces, each of which has room before it is written ─▶ FILE_MADE
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request

from producers.client.steps import FAILURES
from producers.connection.script import arun
from producers.errors import shown
from producers.gateway.context import Gateway
from producers.gateway.fair_share import turn
from producers.gateway.files.multipart import FILE, Form, form_of
from producers.gateway.http import idempotency
from producers.gateway.http.errors import (
    ONCE,
    RETRY_AFTER,
    Problem,
    check_given,
    invalid_value,
    unknown_parameter,
    wrong,
)
from producers.store import files
from producers.store.access.principal import Limits
from producers.store.blobs import BlobWriter
from producers.store.files import BATCH, KEPT_S
from producers.store.idempotency import digest

#: Bytes of a file that are written at a time: what an upload holds in memory, beside the server's 64 KiB.
PIECE: Final = 1 << 18
#: Bytes of a form that are read in one go.
SLICE: Final = 1 << 14
#: Bytes of a form beside its file.
FORM: Final = 1 << 16
#: Bytes that are reserved at a time for a file whose size the request does not declare.
STEP: Final = 16 << 20
#: Time (s) after which a reservation is renewed: a third of its lease.
RENEW_S: Final = files.LEASE_S / 3
#: Longest name of a file, in characters.
MAX_FILENAME: Final = 512
#: A form's fields beside its file.
FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
#: Shortest and longest time (s) for which a file may be kept.
MIN_KEPT_S: Final = 3600
MAX_KEPT_S: Final = 30 * 24 * 3600
#: The JSON schema of `expires_after`, OpenAI's parameter: the time for which a file is kept.
EXPIRES_AFTER: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"enum": ["created_at"]},
        "seconds": {"type": "integer", "minimum": MIN_KEPT_S, "maximum": MAX_KEPT_S},
    },
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a new file. `kept_s`: seconds from now until its end."""

    filename: str
    purpose: str
    kept_s: int


class Room:
    """The room that an upload has reserved among its tenant's files. `most`: bytes that it may need in the end."""

    def __init__(self, gateway: Gateway, upload: str, tenant: str, limits: Limits, most: int) -> None:
        self._store = gateway.client.store
        self._upload = upload
        self._tenant = tenant
        self._limits = limits
        self._most = most
        self._bytes = -1
        self._renew_at = 0.0

    async def hold(self, size: int) -> None:
        """Have so many bytes reserved. Raises Problem where the tenant's limits forbid it, and
        redis.exceptions.RedisError or OSError."""
        if size <= self._bytes and time.monotonic() < self._renew_at:
            return
        enough = max(size, self._bytes)
        target = max(enough, min(size + STEP, self._most))
        answer = await self._reserved(target)
        if answer.reached == "bytes" and target > enough:
            target = enough
            answer = await self._reserved(target)
        if answer.reached is not None:
            raise self._refusal(answer, size)
        self._bytes, self._renew_at = target, time.monotonic() + RENEW_S

    async def give_up(self) -> None:
        """Release what is reserved, unless FILE_MADE did. If the store is away, the lease ends."""
        with suppress(*FAILURES):
            await files.release(self._store, self._upload, self._tenant)

    async def _reserved(self, size: int) -> files.Room:
        limits = self._limits
        call = files.reserve(self._upload, self._tenant, size, limits.max_file_bytes, limits.max_files)
        return files.read_room(await arun(self._store, call))

    def _refusal(self, room: files.Room, size: int) -> Problem:
        limits = self._limits
        if room.reached == "uploads":
            message = f"{room.used} uploads of this tenant are under way, the most; try again once one has ended."
            return Problem(429, message, code="too_many_uploads", headers=RETRY_AFTER)
        hint = "delete some, or wait until they expire"
        if room.reached == "files":
            message = f"This tenant has {room.used} files; at most {limits.max_files} are kept: {hint}."
            return Problem(400, message, code="too_many_files", param=FILE)
        message = (
            f"This tenant's files have {room.used} bytes, and this upload has {size} or more; at most "
            f"{limits.max_file_bytes} are kept: {hint}."
        )
        return Problem(413, message, code="too_many_file_bytes", param=FILE, headers=ONCE)


class Upload(AbstractAsyncContextManager["Upload"]):
    """An upload that is being received, as the blob `name`. Leaving the context without `writer.commit` discards it.

    Entering it reserves what the request declares, before any of it is taken; `receive` reserves the rest. `limits`: of
    what is kept for the tenant. Raises Problem.
    """

    def __init__(self, request: Request, gateway: Gateway, tenant: str, limits: Limits, name: str) -> None:
        self.name = name
        self._request = request
        self._limit = limit = gateway.settings.max_file
        text = request.headers.get("content-length", "")
        declared = int(text) if text.isdecimal() else None
        if declared is not None and declared > limit + FORM:
            raise _too_large(limit)
        self._form: Form = form_of(request)
        self._hash = hashlib.sha256() if idempotency.HEADER in request.headers else None
        max_size = limit if declared is None else min(declared, limit)
        self._room = Room(gateway, name, tenant, limits, max_size)
        self._first = 0 if declared is None else max(0, max_size - FORM)
        self._blobs, self._pieces, self._stall = gateway.blobs, gateway.file_pieces, gateway.settings.stall

    async def __aenter__(self) -> Upload:
        await self._room.hold(self._first)
        self.writer: BlobWriter = self._blobs.writer(self.name)
        return self

    async def receive(self) -> Asked:
        """Write the whole file. Raises Problem, and OSError where it cannot be written."""
        pieces: list[bytes] = []
        size = 0
        async for chunk in self._request.stream():
            for at in range(0, len(chunk), SLICE):
                if at:  # others' turn: what looks like a boundary is read byte by byte
                    await asyncio.sleep(0)
                    await turn()
                content = self._form.feed(chunk[at : at + SLICE])
                pieces += content
                size += sum(map(len, content))
            if self.writer.size + size > self._limit:
                raise _too_large(self._limit)
            if size >= PIECE:
                await self._room.hold(self.writer.size + size)
                await self._write(pieces)
                pieces, size = [], 0
        await self._room.hold(self.writer.size + size)
        await self._write(pieces)
        return _checked(self._form)

    def digest(self, settings: Asked) -> str | None:
        """The digest that an Idempotency-Key compares; None without a key."""
        return None if self._hash is None else digest(self._hash.digest(), repr(settings).encode())

    async def _write(self, pieces: list[bytes]) -> None:
        def write() -> None:
            data = b"".join(pieces)
            if self._hash is not None:
                self._hash.update(data)
            self.writer.write(data)

        async with self._pieces.turn(self._stall):
            await asyncio.to_thread(write)

    async def __aexit__(self, *how: Any) -> None:
        try:
            await asyncio.to_thread(self.writer.__exit__, *how)
        finally:
            await self._room.give_up()


def _checked(form: Form) -> Asked:
    """The settings that a whole form gives. Raises Problem."""
    if not form.ended:
        raise Problem(400, "The form ends early: its last boundary is missing.", code="invalid_form")
    for name in form.fields:
        if name not in FIELDS:
            raise unknown_parameter(name, f"there are {FILE}, {', '.join(FIELDS)}")
    check_given({*form.fields, *([] if form.filename is None else [FILE])}, FILE, "purpose")
    purpose = form.fields["purpose"]
    if purpose != BATCH:
        raise invalid_value("purpose", f'purpose is {shown(purpose)}; files are taken for "{BATCH}"')
    filename = form.filename or "upload"
    if len(filename) > MAX_FILENAME:
        raise invalid_value(FILE, f"the file's name has {len(filename)} characters; at most {MAX_FILENAME} are taken")
    return Asked(filename, purpose, _kept(form.fields))


def _kept(fields: dict[str, str]) -> int:
    values = {
        name: fields[f"expires_after[{name}]"] for name in ("anchor", "seconds") if f"expires_after[{name}]" in fields
    }
    if not values:
        return KEPT_S
    seconds = values.get("seconds", "")
    return expires_after("expires_after", values | ({"seconds": int(seconds)} if seconds.isdecimal() else {}))


def _too_large(limit: int) -> Problem:
    return Problem(
        413, f"The file is too large; at most {limit} bytes are taken (--max-file).", code="file_too_large", param=FILE
    )


def expires_after(name: str, value: Any) -> int:
    """The seconds of the parameter `name`, an object with `anchor` and `seconds`. Raises Problem."""
    expected = f'{{"anchor": "created_at", "seconds": an integer from {MIN_KEPT_S} to {MAX_KEPT_S}}}'
    seconds = value.get("seconds") if isinstance(value, dict) else None
    if (
        not isinstance(value, dict)
        or set(value) != {"anchor", "seconds"}
        or value["anchor"] != "created_at"
        or type(seconds) is not int
        or not MIN_KEPT_S <= seconds <= MAX_KEPT_S
    ):
        raise wrong(name, value, expected)
    return seconds
