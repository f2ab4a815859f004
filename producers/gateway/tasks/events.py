"""`/v1/tasks/{id}/events`: a task's events from any position on, as server-sent events or on a WebSocket.

A WebSocket's messages are the same events as JSON text: `{"event": "token", "data": {...}}`. Its close says what to do:
1000 after the end, 1001 when the gateway stops (come back, behind the last position), 1008 when the caller's key has
ended, 1011 after another `error` event.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response, WebSocket
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

from producers.client.reader import MAX_POSITION
from producers.client.steps import FAILURES
from producers.contract.stream import Event
from producers.errors import PenstockError
from producers.gateway.context import Gateway, gateway_of
from producers.gateway.fair_share import measured, next_of, turn
from producers.gateway.http.authorization import READS, Needs
from producers.gateway.http.connection import cut
from producers.gateway.http.errors import Problem, body_of, problem_of, response_of, wrong
from producers.gateway.http.request_body import query_schema
from producers.gateway.http.sse import EVENT, Direct, EventStream, Stop, encode_all, named, why_stopped
from producers.gateway.tasks.ownership import task_of
from producers.gateway.tasks.views import errors

router = APIRouter(prefix="/v1/tasks", tags=["tasks"])

_POSITION: Final[dict[str, Any]] = {"type": "integer", "minimum": 0, "maximum": MAX_POSITION}
#: Close codes (RFC 6455, 7.4.1) and their reasons.
ENDED: Final = (1000, "the stream has ended")
STOPPING: Final = (1001, "this gateway is stopping: go on at another one")
NOT_TAKEN: Final = (1003, "no messages are taken here")
KEY_ENDED: Final = (1008, "this key does not work any more")
BROKEN: Final = (1011, "see the error event")


@router.get(
    "/{task_id}/events",
    dependencies=READS,
    status_code=200,
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: `prompt` for the prompt's log probabilities, where asked for; "
            "`token` for each token; `chunk` for each part of many texts; then one `end`.",
            "content": {EventStream.media_type: {"schema": EVENT}},
        },
        204: {"description": "The stream ended before the position asked for: do not come back."},
        **errors(404),
    },
    openapi_extra={
        "parameters": [
            query_schema(
                "from",
                "the first position to send; the header Last-Event-ID, one less, goes before it",
                **_POSITION,
                default=0,
            ),
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "the last position that was read, as an EventSource says when it comes back",
                "schema": _POSITION,
            },
        ]
    },
)
async def follow(request: Request, task_id: str) -> Response:
    """Stream a task's events from any position on, until it ends. The same URL takes WebSockets."""
    gateway = gateway_of(request)
    await gateway.streams.enter(request.scope, "events")
    start = _start(request)
    handle = await task_of(request, task_id)
    record = await handle.status()
    direct = Direct(encode_all)
    batches = handle.batches(start, direct)
    first: list[Event] = []
    if record.final:
        # An EventSource reconnects after each response until it gets 204.
        first = await anext(batches, [])
        if not first:
            return Response(status_code=204)
    settings = gateway.settings
    return EventStream(
        batches,
        gateway.streams,
        first=first,
        heartbeat=settings.heartbeat,
        stall=settings.stall,
        waits=partial(gateway.waits.text, task_id, whole=True),
        direct=direct,
    )


@router.websocket("/{task_id}/events")
async def follow_on_socket(websocket: WebSocket, task_id: str) -> None:
    """As `follow`, on a WebSocket. What is refused gets an HTTP error in place of the handshake."""
    gateway: Gateway = websocket.app.state.gateway
    try:
        await Needs("read")(websocket)
        stop = await gateway.streams.enter(websocket.scope, "events")
        start = _start(websocket)
        handle = await task_of(websocket, task_id)
        await handle.status()
    except (Problem, PenstockError, *FAILURES) as error:
        await response_of(problem_of(error), websocket.scope)(websocket.scope, websocket.receive, websocket.send)
        return
    await websocket.accept()
    leaving = asyncio.create_task(_watch_client(websocket, stop))
    stall = gateway.settings.stall
    try:
        async with aclosing(handle.batches(start)) as batches:
            code, reason = await _sent(websocket, batches, stop, stall)
        if code == STOPPING[0] and (problem := why_stopped(stop)) is not None:
            await _send(websocket, [_error(problem)], stall)
            code, reason = KEY_ENDED
        elif code == STOPPING[0] and leaving.done():
            code, reason = NOT_TAKEN
        with suppress(WebSocketDisconnect, RuntimeError):  # it has left
            await websocket.close(code, reason)
    except TimeoutError:
        cut(websocket.scope)
    except WebSocketDisconnect:
        pass
    finally:
        leaving.cancel()


async def _sent(
    websocket: WebSocket, batches: AsyncGenerator[list[Event]], stop: Stop, stall: float
) -> tuple[int, str]:
    """Send events until they end or `stop` is set. Returns how to close. Raises TimeoutError for a stalled reader."""
    while True:
        coming: asyncio.Future[list[Event] | None] = asyncio.ensure_future(measured(next_of, batches))
        try:
            await asyncio.wait((coming, stop), return_when="FIRST_COMPLETED")
            if not coming.done():
                return STOPPING
            events = coming.result()
        except (PenstockError, *FAILURES) as error:
            await _send(websocket, [_error(error)], stall)
            return BROKEN
        finally:
            if coming.cancel():
                await asyncio.wait((coming,))
        if events is None:
            return ENDED
        await _send(websocket, [named(event) for event in events], stall)


def _error(error: Exception) -> tuple[str, str]:
    return "error", json.dumps(body_of(problem_of(error)))


async def _send(websocket: WebSocket, events: Sequence[tuple[str, str]], stall: float) -> None:
    for name, data in events:
        await turn()
        async with asyncio.timeout(stall):
            await websocket.send_text(f'{{"event":"{name}","data":{data}}}')


async def _watch_client(websocket: WebSocket, stop: Stop) -> None:
    """Wait until the client has gone or says something, then set `stop`."""
    await websocket.receive()
    if not stop.done():
        stop.set_result(None)


def _start(request: HTTPConnection) -> int:
    """The requested position. The header wins: a reconnecting browser repeats the URL and adds the header."""
    last = request.headers.get("last-event-id")
    if last:
        return _position(last, "Last-Event-ID") + 1
    position = request.query_params.get("from")
    return 0 if position is None else _position(position, "from")


def _position(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,19}", text) or int(text) > MAX_POSITION:
        raise wrong(name, text, "a position in the stream, from 0 up.")
    return int(text)
