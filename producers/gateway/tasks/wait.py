"""The header `Prefer: wait=N` (RFC 7240): the answer waits for the task's end, up to N seconds."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing, suppress
from typing import Any, Final

from fastapi import Request
from starlette.datastructures import Headers

from producers.client.aio import AsyncHandle
from producers.client.steps import FAILURES
from producers.errors import PenstockError
from producers.gateway.context import Gateway
from producers.gateway.fair_share import measured
from producers.gateway.http.sse import watch
from producers.gateway.http.streams import why_stopped

#: Longest wait (s); who asks for more waits for this long.
LONGEST_S: Final = 60
_WAIT: Final = re.compile(r"\s*wait\s*=\s*\"?([0-9]{1,200})\"?\s*(;.*)?", re.IGNORECASE)
#: The header for OpenAPI.
PARAMETER: Final[dict[str, Any]] = {
    "name": "Prefer",
    "in": "header",
    "description": f"`wait=N`: answer at the task's end, or after N seconds, {LONGEST_S} at most",
    "schema": {"type": "string", "maxLength": 200},
}


def wished(headers: Headers) -> int | None:
    """For how long (s) the answer is to wait. A preference that cannot be read is none, says the RFC."""
    for part in ",".join(headers.getlist("prefer")).split(","):
        if match := _WAIT.fullmatch(part):
            return min(int(match[1]), LONGEST_S)
    return None


async def entered(request: Request, gateway: Gateway) -> int | None:
    """As `wished`; a request that waits is one of the gateway's streams from now on. Raises Problem where it has as
    many as it takes, and as `Streams.enter`."""
    seconds = wished(request.headers)
    if seconds is not None:
        await gateway.streams.enter(request.scope, "answer")
    return seconds


def applied(seconds: int | None) -> dict[str, str]:
    """The headers that say for how long the answer was to wait."""
    return {} if seconds is None else {"preference-applied": f"wait={seconds}"}


async def wait(request: Request, gateway: Gateway, handle: AsyncHandle, seconds: int) -> None:
    """Wait for the task's end, `seconds` at most; less if the caller leaves, the gateway stops or the store fails.
    Raises Problem if the caller's key ends."""
    stop = await gateway.streams.enter(request.scope, "answer")
    leaving = asyncio.create_task(watch(request.receive, stop))
    end = asyncio.create_task(measured(_end, handle))
    try:
        await asyncio.wait((end, stop), timeout=seconds, return_when="FIRST_COMPLETED")
    finally:
        leaving.cancel()
        if end.cancel():
            await asyncio.wait((end,))
    if (problem := why_stopped(stop)) is not None:
        raise problem


async def _end(handle: AsyncHandle) -> None:
    with suppress(PenstockError, *FAILURES):
        async with aclosing(handle.batches()) as batches:
            async for _ in batches:
                pass
