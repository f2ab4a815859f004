"""Receives an upload: a form with one file, which goes to a blob as it comes."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request

from producers.errors import shown
from producers.gateway.files.expiry import expires_after
from producers.gateway.files.multipart import FILE, Form, form_of
from producers.gateway.http import idempotency
from producers.gateway.http.errors import Problem, check_given, invalid_value, unknown_parameter
from producers.store.blobs import Blobs, BlobWriter
from producers.store.files import BATCH
from producers.store.idempotency import digest

#: Bytes of a file that are written at a time: what an upload holds in memory, beside the server's 64 KiB.
PIECE: Final = 1 << 18
#: Bytes of a form beside its file.
FORM: Final = 1 << 16
#: Longest name of a file, in characters.
MAX_FILENAME: Final = 512
#: A form's fields beside its file.
FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a new file. `kept_s`: seconds from now until its end; None: for ever."""

    filename: str
    purpose: str
    kept_s: int | None


class Upload(AbstractAsyncContextManager["Upload"]):
    """An upload that is being received, as the blob `name`. Leaving the context without `writer.commit` discards it."""

    def __init__(self, request: Request, blobs: Blobs, limit: int, name: str) -> None:
        self.name = name
        self._request = request
        self._limit = limit
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit + FORM:
            raise _too_large(limit)
        self._form: Form = form_of(request)
        self._hash = hashlib.sha256() if idempotency.HEADER in request.headers else None
        self.writer: BlobWriter = blobs.writer(name)

    async def receive(self) -> Asked:
        """Write the whole file. Raises Problem, and OSError where it cannot be written."""
        pieces: list[bytes] = []
        size = 0
        async for chunk in self._request.stream():
            found = self._form.feed(chunk)
            pieces += found
            size += sum(map(len, found))
            if self.writer.size + size > self._limit:
                raise _too_large(self._limit)
            if size >= PIECE:
                await self._write(pieces)
                pieces, size = [], 0
        await self._write(pieces)
        return _checked(self._form)

    def digest(self, asked: Asked) -> str | None:
        """The digest that an Idempotency-Key compares; None without a key."""
        return None if self._hash is None else digest(self._hash.digest(), repr(asked).encode())

    async def _write(self, pieces: list[bytes]) -> None:
        def write() -> None:
            data = b"".join(pieces)
            if self._hash is not None:
                self._hash.update(data)
            self.writer.write(data)

        await asyncio.to_thread(write)

    async def __aexit__(self, *how: Any) -> None:
        await asyncio.to_thread(self.writer.__exit__, *how)


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


def _kept(fields: dict[str, str]) -> int | None:
    given = {
        name: fields[f"expires_after[{name}]"] for name in ("anchor", "seconds") if f"expires_after[{name}]" in fields
    }
    if not given:
        return None
    seconds = given.get("seconds", "")
    return expires_after("expires_after", given | ({"seconds": int(seconds)} if seconds.isdecimal() else {}))


def _too_large(limit: int) -> Problem:
    return Problem(
        413, f"The file is too large; at most {limit} bytes are taken (--max-file).", code="file_too_large", param=FILE
    )
