"""Reads a request's JSON body, with limits on its size before and after unpacking."""

from __future__ import annotations

import asyncio
import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any, Final, TypeVar

from fastapi import Request

from producers.contract.task import Task, read_json
from producers.errors import InvalidTask, shown
from producers.gateway.http.errors import Problem, media_type
from producers.gateway.http.idempotency import note_body

T = TypeVar("T")

#: A too large body is read and discarded up to this many times the limit: a client that is cut off while it sends sees
#: a broken connection instead of the error.
COURTESY = 4
#: Larger bodies (bytes) are parsed off the event loop.
INLINE = 64 * 1024


async def read_task(request: Request, limit: int) -> Task:
    """The task in a request's body. Raises InvalidTask, and Problem for a body that is too large or not JSON."""
    return await _parsed(request, limit, Task.parse_json)


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in a request's body. Raises as `read_task` does."""
    value = await _parsed(request, limit, read_json)
    if not isinstance(value, dict):
        raise InvalidTask(f"the body is a JSON object, not {shown(value)}", code="invalid_type")
    return value


async def _parsed(request: Request, limit: int, parse: Callable[[bytes], T]) -> T:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        said = f"it has {shown(kind)}" if kind else "it has none"
        raise media_type(f"The request must have the content type application/json; {said}.", accept="application/json")
    unpack = _unpacking(request)
    body = await _read(request, limit)
    if unpack is not None:
        body = await asyncio.to_thread(unpack, body, limit)
    note_body(request, body)
    if len(body) <= INLINE:
        return parse(body)
    return await asyncio.to_thread(parse, body)


def _unpacking(request: Request) -> Callable[[bytes, int], bytes] | None:
    """The function that unpacks the body's Content-Encoding, or None. Raises Problem for an unknown one."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in CODINGS:
        said = f"The body has the content encoding {shown(coding)}; gzip is taken, or none."
        raise media_type(said, accept_encoding="gzip")
    return CODINGS[coding]


def _gunzip(body: bytes, limit: int) -> bytes:
    """Unpack gzip. Raises Problem for bad data, or for more than `limit` bytes, without unpacking more."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(body)) as packed:
            plain = packed.read(limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Problem(400, f"The body is not gzip: {error}.", code="invalid_gzip") from None
    if len(plain) > limit:
        raise _too_large(limit)
    return plain


#: Supported content encodings -> their unpackers.
CODINGS: Final[dict[str, Callable[[bytes, int], bytes] | None]] = {"identity": None, "gzip": _gunzip, "x-gzip": _gunzip}


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
            body += chunk
        elif size > COURTESY * limit:
            break
    if size > limit:
        problem = _too_large(limit)
        problem.headers["connection"] = "close"
        raise problem
    return bytes(body)


def _too_large(limit: int) -> Problem:
    return Problem(413, f"The body is too large; at most {limit} bytes are taken.", code="body_too_large")
