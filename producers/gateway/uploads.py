"""Receives an upload: a form (multipart/form-data, RFC 7578) with one file, which goes to a blob as it comes.

room for what the request declares ─▶ pieces, each of which has room before it is written ─▶ FILE_MADE
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import unicodedata
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from producers.client.steps import FAILURES
from producers.connection.script import arun
from producers.errors import shown
from producers.gateway.context import Gateway
from producers.gateway.fair_share import in_thread, turn
from producers.gateway.http import idempotency
from producers.gateway.http.errors import (
    ONCE,
    RETRY_AFTER,
    Problem,
    check_given,
    invalid_value,
    media_type,
    unknown_parameter,
    wrong,
)
from producers.store import files
from producers.store.access.api_keys import Limits
from producers.store.blobs import BlobWriter
from producers.store.files import BATCH, KEPT_S
from producers.store.idempotency import digest

#: Longest field (bytes); and most parts of a form.
MAX_FIELD: Final = 4096
MAX_PARTS: Final = 32
#: Unicode's categories of characters that no name shows: control, format, surrogate, private, unassigned, line ends.
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: The part that is the file.
FILE: Final = "file"
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


class Form:
    """A form, fed with its bytes. Raises Problem for what is no form, or has parts that are too many or too long.

    `fields`: names and texts. `filename`: the file's, None before it comes. `ended`: the form is whole.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.ended = False
        self._file: list[bytes] = []
        self._parts = 0
        self._name = ""
        self._value = bytearray()
        self._header = bytearray()
        self._content = bytearray()
        self._disposition = b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": self._over,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None

    def feed(self, data: bytes) -> list[bytes]:
        """Take some of the form. Returns what there is in it of the file's bytes."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _broken(str(error)) from None
        content, self._file = self._file, []
        return content

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _broken(f"it has more than {MAX_PARTS} parts")
        self._disposition = b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._content)
        self._header.clear()
        self._content.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise _broken("a part has no name")
        self._name = _text(options[b"name"], "a part's name")
        self._value.clear()
        if self._name in self.fields or (self._name == FILE and self.filename is not None):
            raise invalid_value(self._name, f"{shown(self._name)} comes twice.")
        if self._name == FILE:
            self.filename = base_name(_text(options.get(b"filename", b"upload"), "the file's name"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD:
            raise invalid_value(self._name, f"{shown(self._name)} has more than {MAX_FIELD} bytes.")

    def _end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = _text(bytes(self._value), self._name)

    def _over(self) -> None:
        self.ended = True


def base_name(name: str) -> str:
    """A file's name without folders and without what no name shows: control and format characters, line ends.

    Whoever downloads the file may write it under this name.
    """
    base = name.replace("\\", "/").rpartition("/")[2]
    base = "".join(sign for sign in base if unicodedata.category(sign) not in _HIDDEN).strip()
    return "upload" if base in ("", ".", "..") else base


def form_of(request: Request) -> Form:
    """A form to feed with the request's body. Raises Problem for another kind of body."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        message = shown(request.headers.get("content-type", ""))
        message = f"The request must have the content type multipart/form-data, with a boundary; it has {message}."
        raise media_type(message, accept="multipart/form-data")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"The body has the content encoding {shown(coding)}; files are taken without one."
        raise media_type(message, accept_encoding="identity")
    return Form(options[b"boundary"])


def _text(data: bytes, subject: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _broken(f"{subject} is not UTF-8") from None


def _broken(why: str) -> Problem:
    return Problem(400, f"The body is no form (multipart/form-data): {why}.", code="invalid_form")


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The settings of a new file. `kept_s`: seconds from now until its end."""

    filename: str
    purpose: str
    kept_s: int


class Room:
    """The room that an upload has reserved among its tenant's files. `most`: bytes that it may need in the end."""

    def __init__(self, gateway: Gateway, upload: str, tenant: str, limits: Limits, max_size: int) -> None:
        self._store = gateway.client.store
        self._upload = upload
        self._tenant = tenant
        self._limits = limits
        self._max_size = max_size
        self._bytes = -1
        self._renew_at = 0.0

    async def hold(self, size: int) -> None:
        """Have so many bytes reserved. Raises Problem where the tenant's limits forbid it, and
        redis.exceptions.RedisError or OSError."""
        if size <= self._bytes and time.monotonic() < self._renew_at:
            return
        enough = max(size, self._bytes)
        target = max(enough, min(size + STEP, self._max_size))
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

    async def receive(self) -> FileSettings:
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

    def digest(self, settings: FileSettings) -> str | None:
        """The digest that an Idempotency-Key compares; None without a key."""
        if self._hash is None:
            return None
        # Written as earlier releases wrote it: what they kept under a key is compared with this for a day.
        text = f"Asked(filename={settings.filename!r}, purpose={settings.purpose!r}, kept_s={settings.kept_s!r})"
        return digest(self._hash.digest(), text.encode())

    async def _write(self, pieces: list[bytes]) -> None:
        def write() -> None:
            data = b"".join(pieces)
            if self._hash is not None:
                self._hash.update(data)
            self.writer.write(data)

        async with self._pieces.turn(self._stall):
            await in_thread(write)

    async def __aexit__(self, *how: Any) -> None:
        try:
            await in_thread(self.writer.__exit__, *how)
        finally:
            await self._room.give_up()


def _checked(form: Form) -> FileSettings:
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
    return FileSettings(filename, purpose, _kept(form.fields))


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
