"""`/v1/files`, as OpenAI has it: its routes, the JSON of files, and their content, whole or one range (RFC 9110, 14).

    body -> uploads: pieces -> a blob that nobody sees -> commit, FILE_MADE
    GET .../content -> FileContent, piece by piece

The bytes of files are blobs; the store holds their metadata. No file is in memory: a gateway holds a piece of each one
that it receives or sends. Errors of the folder or bucket become what callers see.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field
from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from producers.connection.aws import AwsError, AwsNotInstalled
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun, text
from producers.connection.turns import Busy, Turns
from producers.contract import keys
from producers.errors import shown
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.fair_share import in_thread, turn
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import CANCELS, PARAMETER, READS, SUBMITS, tenant_of
from producers.gateway.http.connection import cut
from producers.gateway.http.edge import HEAD
from producers.gateway.http.errors import Problem, gone, unavailable
from producers.gateway.tasks.ownership import audit_operator, foreign_tenant, sees
from producers.gateway.tasks.views import Named, Page, errors
from producers.gateway.uploads import EXPIRES_AFTER, FileSettings, Upload
from producers.store import files
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.files import BATCH, File
from producers.store.idempotency import Entry

logger = logging.getLogger(__name__)

#: Bytes that are read at a time: what a download holds in memory, beside the server's buffer.
PIECE: Final = 1 << 18
#: Time (s) for which a URL opens a file: the download has to begin within it.
URL_S: Final = 900
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
router = APIRouter(prefix="/v1/files", tags=["files"])
#: The largest `limit` of a list, which is also the usual one, as with OpenAI. No page has more than PAGE files.
MAX_PAGE: Final = 10_000
PAGE: Final = 1000
ID: Final = re.compile(f"{files.PREFIX}[0-9a-f]{{32}}")
_FORM: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": [BATCH]},
        "expires_after": EXPIRES_AFTER | {"example": {}},  # a form made from the schema would let each file expire
    },
    "additionalProperties": False,
}
#: Errors of a disk that takes no more.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileContent(Response):
    """Bytes `start` to `end` (exclusive) of a file.

    `first`: the first piece of them. A reader that takes nothing for `stall` seconds is cut off. So is one whose file
    is deleted meanwhile: the length that it was told no longer holds.
    """

    media_type = "application/octet-stream"

    def __init__(
        self, blobs: Blobs, pieces: Turns, file: File, start: int, end: int, first: bytes, stall: float
    ) -> None:
        self.status_code = 200 if (start, end) == (0, file.size) else 206
        self.background = None
        self._blobs, self._pieces, self._name = blobs, pieces, file.id
        self._at, self._end = start + len(first), end
        self._first = first
        self._stall = stall
        headers = {
            "content-length": str(end - start),
            "accept-ranges": "bytes",
            "etag": f'"{file.id}"',
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.filename, errors='replace')}",
        }
        if self.status_code == 206:
            headers["content-range"] = f"bytes {start}-{end - 1}/{file.size}"
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        piece = self._first
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while piece:
                await turn()
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                size = min(PIECE, self._end - self._at)
                async with self._pieces.turn(self._stall):
                    piece = await in_thread(self._blobs.read, self._name, self._at, size)
                self._at += len(piece)
            if self._at < self._end:
                raise BlobNotFound(f"{self._name} ends at {self._at} bytes")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, Busy, BlobNotFound, OSError) as error:
            logger.info("cut off a reader of %s: %s", self._name, str(error) or f"took nothing for {self._stall} s")
            cut(scope)


async def content_of(request: Request, blobs: Blobs, pieces: Turns, file: File, stall: float) -> FileContent:
    """The answer to a request for a file's content. `pieces`: permits to read one. Raises Problem, and OSError."""
    start, end = _requested_range(request, file)
    with _stored(file):
        async with pieces.turn(stall):
            first = await in_thread(blobs.read, file.id, start, min(PIECE, end - start))
    return FileContent(blobs, pieces, file, start, end, first, stall)


async def redirect_of(blobs: Blobs, file: File) -> Response:
    """An answer that sends the caller to the bucket. Raises Problem, and OSError."""
    with _stored(file):
        await in_thread(blobs.size, file.id)
    url = await in_thread(blobs.url, file.id, file.filename, URL_S)
    assert url is not None, "the settings are refused where there are no URLs"
    return RedirectResponse(url, 307)


@contextmanager
def _stored(file: File) -> Iterator[None]:
    try:
        yield
    except BlobNotFound:
        warn_throttled(logger, "a file is known, and not in this gateway's --files-dir: %s", file.id)
        message = (
            f"The content of {file.id} is not in this gateway's --files-dir, which all gateways and sweepers share."
        )
        raise unavailable(message, code="file_unavailable") from None


def _requested_range(request: Request, file: File) -> tuple[int, int]:
    """Begin and end (exclusive) of the range that is asked for. Several ranges are answered by the whole file."""
    header = request.headers.get("range")
    match = None if header is None else _RANGE.fullmatch(header.strip())
    if (
        match is None
        or match.group(0) == "bytes=-"
        or request.headers.get("if-range", f'"{file.id}"') != f'"{file.id}"'
    ):
        return 0, file.size
    first, last = match.groups()
    if first:
        start, end = int(first), min(int(last) + 1 if last else file.size, file.size)
    else:
        start, end = max(0, file.size - int(last)), file.size
    if start >= end:
        raise Problem(
            416,
            f"Range is {shown(header)}; the file has {file.size} bytes.",
            code="invalid_range",
            param="Range",
            headers={"content-range": f"bytes */{file.size}"},
        )
    return start, end


class FileView(Named):
    """A file. Times are unix seconds."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str = Field(description="batch: an input; batch_output: what a batch wrote")
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, file: File) -> Self:
        return cls(**asdict(file) | {"bytes": file.size, "status": "processed"})


class FileList(Page[FileView]):
    pass


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: bool


@router.post(
    "",
    dependencies=SUBMITS,
    response_model=FileView,
    responses=errors(413, 415, 422),
    openapi_extra={
        "parameters": [idempotency.PARAMETER, PARAMETER],
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": _FORM,
                    "encoding": {"expires_after": {"style": "deepObject", "explode": True}},
                }
            },
        },
    },
)
async def create(request: Request, response: Response) -> FileView:
    """Upload a file. It is whole and durable once this answers."""
    gateway = gateway_of(request)
    owner = tenant_of(request)
    new_id = files.new_id(int(time.time() * 1000))
    with storage_errors():
        limits = await gateway.accounts.kept(owner)
        async with Upload(request, gateway, owner or "", limits, new_id) as upload:
            settings = await upload.receive()
            entry = await idempotency.first(
                request, gateway.client, new_id, tenant=owner, digest=upload.digest(settings)
            )
            if entry is not None and entry.state == "made":
                response.headers.update(idempotency.REPLAYED)
                return await _original(gateway, entry)
            file = await _make_file(gateway, upload, settings, owner, new_id if entry is None else entry.id)
    if entry is not None:
        await idempotency.mark_made(gateway.client, entry)
    return FileView.of(file)


async def _make_file(gateway: Gateway, upload: Upload, settings: FileSettings, owner: str | None, file_id: str) -> File:
    """Make the file; or find it, where an equal request did at the same time. Raises Problem."""
    now, store = int(time.time()), gateway.client.store
    file = File(
        file_id, upload.writer.size, settings.filename, settings.purpose, now, now + settings.kept_s, owner or ""
    )
    for name in {file_id, upload.name}:  # a commit under another name may leave the first one, if it is killed
        await files.note(store, name)
    async with gateway.file_pieces.turn(gateway.settings.stall):
        await in_thread(upload.writer.commit, file_id)
    answer = text(await arun(store, files.file_made(file, upload.name)))
    if answer == "late":
        raise unavailable("The file was written too slowly; send it again.", code="service_unavailable")
    return file


async def _original(gateway: Gateway, entry: Entry) -> FileView:
    file = await files.get(gateway.client.store, entry.id)
    if file is None:
        message = f"file {entry.id}, which was deleted or has expired; use another key to upload it again."
        raise gone(message, code="file_not_found")
    return FileView.of(file)


@router.get("", dependencies=READS, response_model=FileList, openapi_extra={"parameters": [PARAMETER]})
async def listed(
    request: Request,
    purpose: Annotated[Literal["", "batch", "batch_output"], Query(description="only files of this purpose")] = "",
    limit: Annotated[
        int, Query(ge=1, le=MAX_PAGE, description="most files in the page, which has 1000 at most")
    ] = MAX_PAGE,
    after: Annotated[
        str | None, Query(pattern=f"^{ID.pattern}$", description="the id of the file before the page")
    ] = None,
    order: Annotated[Literal["desc", "asc"], Query(description="by the time at which they were made")] = "desc",
) -> FileList:
    """List the tenant's files, a page at a time."""
    limit = min(limit, PAGE)
    rows = await files.listed(
        gateway_of(request).client.store,
        tenant=tenant_of(request) or "",
        purpose=purpose or None,
        after=after,
        limit=limit + 1,
        newest_first=order == "desc",
    )
    return FileList.of([*map(FileView.of, rows)], limit)


@router.get("/{file_id}", dependencies=READS, response_model=FileView, responses=errors(404))
async def look(request: Request, file_id: str) -> FileView:
    """Get what is known of a file."""
    return FileView.of(await file_of(request, file_id))


@router.get(
    "/{file_id}/content",
    dependencies=READS,
    response_class=Response,
    responses={
        200: {"content": {FileContent.media_type: {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "the range that was asked for", "content": {FileContent.media_type: {}}},
        307: {"description": "the content is at `location`, for some minutes (--files-redirect)"},
        **errors(404, 416),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "Range",
                "in": "header",
                "description": "one range of bytes, to go on with an interrupted download",
                "schema": {"type": "string"},
            }
        ]
    },
)
async def content(request: Request, file_id: str) -> Response:
    """Get a file's bytes."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "download")
    file = await file_of(request, file_id)
    with storage_errors():
        if gateway.settings.files_redirect and not request.scope.get(HEAD):
            return await redirect_of(gateway.blobs, file)
        return await content_of(request, gateway.blobs, gateway.file_pieces, file, gateway.settings.stall)


@router.delete("/{file_id}", dependencies=CANCELS, response_model=FileDeleted, responses=errors(404))
async def delete(request: Request, file_id: str) -> FileDeleted:
    """Delete a file. A batch that still needs it fails."""
    gateway = gateway_of(request)
    await file_of(request, file_id)
    other = await foreign_tenant(request, keys.file(file_id))
    with storage_errors():
        async with gateway.file_pieces.turn(gateway.settings.stall):
            removed = await files.remove(gateway.client.store, gateway.blobs, file_id)
        if not removed:
            raise _none(file_id)
    await audit_operator(request, "file.delete", file_id, other)
    return FileDeleted(id=file_id, deleted=True)


async def file_of(request: Request, file_id: str, param: str | None = None) -> File:
    """A file of the caller. Raises Problem; `param`: the parameter that names it."""
    file = None
    if ID.fullmatch(file_id) and await sees(request, keys.file(file_id)):
        file = await files.get(gateway_of(request).client.store, file_id)
    if file is None:
        raise _none(file_id, param)
    return file


def _none(file_id: str, param: str | None = None) -> Problem:
    return Problem(
        404, f"There is no file {shown(file_id)}; it was deleted, or has expired.", code="file_not_found", param=param
    )


@contextmanager
def storage_errors() -> Iterator[None]:
    """Within it, an error of the folder or the bucket becomes a Problem; the log has its own words."""
    try:
        yield
    except (AwsError, AwsNotInstalled) as error:
        message = "The bucket for files does not answer, or refuses; the gateway's log says why."
        raise _problem(error, message) from error
    except OSError as error:
        if error.errno is None or isinstance(error, ConnectionError | TimeoutError):  # of the store
            raise
        if error.errno in _FULL:
            raise _problem(error, "The disk for files is full: no file is taken for now.", "storage_full") from error
        raise _problem(error, "This gateway cannot use its folder for files; its log says why.") from error


def _problem(error: Exception, message: str, code: str = "file_unavailable") -> Problem:
    warn_throttled(logger, "--files-dir cannot be used: %s", error)
    return unavailable(message, code=code)
