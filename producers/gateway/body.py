"""Reading a request's JSON, with limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from producers.errors import InvalidTask
from producers.gateway.errors import Problem
from producers.task import Task, read_json, shown

T = TypeVar("T")

#: A body beyond the limit is still read up to this many times the limit, and thrown away: a client that is cut off
#: while it sends sees a broken connection instead of the reason.
COURTESY = 4
#: Larger bodies (bytes) are parsed off the event loop.
INLINE = 64 * 1024


async def read_task(request: Request, limit: int) -> Task:
    """The task in a request's body. Raises InvalidTask, and Problem for what is no JSON or too much."""
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
        shown = f"it has {kind!r}" if kind else "it has none"
        raise Problem(
            415,
            f"The request must have the content type application/json; {shown}.",
            code="unsupported_media_type",
            headers={"accept": "application/json"},
        )
    body = await _read(request, limit)
    if len(body) <= INLINE:
        return parse(body)
    return await asyncio.to_thread(parse, body)


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
