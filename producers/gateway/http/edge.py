"""The middlewares around all routes: the callers' turns, request ids, counts, uncaught errors, and the end of streams.

`InTurn` is the outermost: each request begins when it is its caller's turn, and its time is charged to its caller. It
stands outside of CORS, which answers preflights by itself. `Edge` is inside of CORS, around the routes.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producers.connection.addresses import network_of
from producers.connection.turns import OWNER
from producers.gateway.fair_share import IDLE_TALK, SHARE, FairShare, Measured
from producers.gateway.http.authorization import caller_of
from producers.gateway.http.connection import PRIVATE, STATIC, connection_of
from producers.gateway.http.errors import (
    REQUEST_ID,
    Problem,
    is_anthropic,
    problem_of,
    response_of,
    too_many_open,
    too_many_waiting,
)
from producers.gateway.http.request_state import MAX_WARNING, begin_trace, log_subject
from producers.gateway.http.sse import STOP, Streams
from producers.gateway.metrics import Metrics
from producers.tracing.export import Tracer

logger = logging.getLogger(__name__)

#: Paths that ask for this process's health alone. They wait in lines of their own: a prober may share its address.
PROBES: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})
#: Paths of pages for people with a browser, who need no key; beside them, the files below ASSETS.
PAGES: Final = frozenset({"/", "/console", "/docs", "/openapi.json"})
#: Names in a request's state: of the Problem with which the edge refuses it, where its caller has as many requests as
#: may be; and where it was refused (4xx), by whomever.
FULL, REFUSED = "full_line", "refused"
#: The part of all connections on which one caller may have requests under way: bodies that come slowly, answers that
#: are taken slowly. Streams have smaller bounds (`producers.gateway.http.sse`).
PART: Final = 2
#: True in the scope of a HEAD, whose method is GET for all that is behind the edge.
HEAD: Final = "penstock.head"
METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
#: Paths on which Anthropic's API has other files than we do, and what its clients are told.
FILES: Final = "/v1/files"
NO_FILES: Final = "Anthropic's files are not offered: send their text in a message."
#: Callers' request ids that are safe in logs and are kept.
SAFE_ID: Final = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")
#: Addresses that are safe in logs; a proxy passes on what callers write.
CLIENT: Final = re.compile(r"[A-Za-z0-9_.:%-]{1,64}")
#: The place in ADMIT's answer (`Charge.answer`) of what is left of a minute's requests, and tokens; then the names of
#: three headers: the limit, what is left of it, and when the minute ends.
RATE_LIMITS: Final = tuple(
    (
        at,
        f"x-ratelimit-limit-{kind}".encode(),
        f"x-ratelimit-remaining-{kind}".encode(),
        f"x-ratelimit-reset-{kind}".encode(),
    )
    for at, kind in ((3, "requests"), (5, "tokens"))
)
#: Most parameters of a URL's query.
MAX_PARAMETERS: Final = 256
#: The client of a connection without an address, over a Unix socket.
NOBODY: Final = ("nobody",)
#: Paths of files that are the same for all callers, and may be kept by browsers and proxies.
DOCS_ASSETS, CONSOLE_ASSETS = ASSETS = ("/docs/assets/", "/console/assets/")
#: Messages that begin an answer: one to a request, to a WebSocket's handshake, and to one that is refused.
BEGINNINGS: Final = ("http.response.start", "websocket.accept", "websocket.http.response.start")


class InTurn:
    """ASGI middleware. `connections`: the most that the gateway takes."""

    def __init__(self, app: ASGIApp, fair_share: FairShare, connections: int) -> None:
        self._app = app
        self._fair_share = fair_share
        self._limit = max(1, connections // PART)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection, state = connection_of(scope), scope.setdefault("state", {})
        if connection is not None and connection.lost:
            return
        counts = scope["path"] not in PROBES
        share = self._fair_share.of(caller_of(scope) if counts else ("probes", caller_of(scope)))
        share.open += counts
        SHARE.set(share)
        if connection is not None:
            connection.belongs_to(share)
        try:
            if share.open > self._limit:
                state[FULL] = too_many_open(self._limit)
            elif not self._fair_share.may(share, time.monotonic()):
                turn = self._fair_share.wait(share)
                if turn is None:
                    state[FULL] = too_many_waiting()
                else:
                    if connection is not None:
                        connection.turn = turn
                    if not await turn:
                        return
            handling = cast("Coroutine[Any, Any, None]", self._app(scope, receive, send))
            request = Measured(handling, share)
            await request
            if STOP not in state:  # a stream has used more since its answer began
                idle_talk = not counts or REFUSED in state or _is_page(scope["path"])
                request.share.learn(request.since(), IDLE_TALK if idle_talk else 1)
        finally:
            share.open -= counts
            if counts:  # a key that came for the first time has its tenant now
                self._fair_share.note_request(caller_of(scope), time.monotonic())


def _is_page(path: str) -> bool:
    return path in PAGES or path.startswith(ASSETS)


class Edge:
    """ASGI middleware. Starlette's base class would cost each streamed chunk a queue and a task."""

    def __init__(self, app: ASGIApp, metrics: Metrics, streams: Streams, tracer: Tracer | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._tracer = tracer
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        refusal: Problem | None = state.get(FULL) or _long_query(scope)
        share = SHARE.get()
        assert share is not None  # `InTurn` has set it, and the state
        arrived = time.perf_counter()
        share.running += 1
        OWNER.set((network_of((scope.get("client") or NOBODY)[0]),))  # until it is known whose key this is
        headers = Headers(scope=scope)
        span = begin_trace(headers, None if scope["path"] in PROBES else self._tracer)
        header = headers.get("x-request-id", "")
        state[REQUEST_ID] = request_id = header if SAFE_ID.fullmatch(header) else uuid.uuid4().hex
        anthropic = is_anthropic(scope)
        if anthropic and scope["path"].startswith(FILES):
            refusal = refusal or Problem(404, NO_FILES, code="not_found")
        app = self._app if refusal is None else response_of(refusal, scope)
        begun = False
        method = scope.get("method", "GET")  # a WebSocket's handshake is a GET
        method = method if method in METHODS else "other"
        if method == "HEAD":
            scope, send = {**scope, "method": "GET", HEAD: True}, _without_body(send)

        async def send_on(message: Message) -> None:
            nonlocal begun
            if message["type"] in BEGINNINGS:
                if not begun:
                    share.running -= 1
                if 400 <= message.get("status", 101) < 500:
                    state[REFUSED] = True
                begun = True
                answer_headers = MutableHeaders(scope=message)
                answer_headers["x-request-id"] = request_id
                if anthropic:
                    answer_headers["request-id"] = request_id
                message["headers"] += STATIC if scope["path"].startswith(ASSETS) else PRIVATE
                if (charge := state.get("charge")) is not None and charge.answer:
                    message["headers"] += rate_limit_headers(charge.answer)
                message["headers"].extend(overload(state))
                message["headers"].extend(routed(state))
                if (work := state.get("work")) is not None and work.warnings:
                    message["headers"].append((b"penstock-warning", _one_line("; ".join(work.warnings))))
                route = getattr(scope.get("route"), "path", "unmatched")
                status = message.get("status", 101)
                self._metrics.answered(method, route, status, time.perf_counter() - arrived)
                if span is not None:
                    span.begin_answer(status)
            elif message["type"] == "websocket.close" and not begun:  # the framework's answer where no route matches
                await response_of(problem_of(HTTPException(404)), scope)(scope, receive, send_on)
                return
            await send(message)

        try:
            await app(scope, receive, send_on)
        except ClientDisconnect:
            logger.info("request %s: its client (%s) left before it was read", request_id, _client(scope))
        except Exception as error:
            request_log = (request_id, method, scope["path"], _client(scope))
            logger.exception("request %s (%s %s of %s) failed", *request_log, extra=log_subject(request_id))
            if begun:
                raise
            await response_of(problem_of(error), scope)(scope, receive, send_on)
        finally:
            if not begun:
                share.running -= 1
            self._streams.leave(scope)
            if span is not None:
                work = state.get("work")
                span.end(scope, method, request_id, "" if work is None else work.tenant)


def _long_query(scope: Scope) -> Problem | None:
    """The error for a query of more parameters than any request has: 64 KB of them take tens of milliseconds to read,
    before anybody knows whose they are."""
    query: bytes = scope.get("query_string", b"")
    if query.count(b"&") < MAX_PARAMETERS:
        return None
    message = f"The URL's query has more than {MAX_PARAMETERS} parameters, which is more than any request needs."
    return Problem(400, message, code="too_many_parts")


def _client(scope: Scope) -> str:
    """The caller's address, for logs: where a trusted proxy stands before us, the one that it names."""
    host = (scope.get("client") or ("nobody",))[0]
    return host if CLIENT.fullmatch(host) else "unknown"


def _without_body(send: Send) -> Send:
    """Answer HEAD as GET, with the head only. A stream takes the end for a disconnect, and ends."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})

    return send_head


def rate_limit_headers(answer: Sequence[Any]) -> list[tuple[bytes, bytes]]:
    """Returns OpenAI's headers for the remainder of limits a minute. `answer`: as in `Charge`, not empty."""
    reset, headers = b"%gs" % (answer[2] / 1000), []
    for at, limit, remaining, until in RATE_LIMITS:
        if answer[at + 1] >= 0:
            headers += [(limit, b"%d" % answer[at + 1]), (remaining, b"%d" % answer[at]), (until, reset)]
    return headers


def _one_line(text: str) -> bytes:
    """A text for a header: of printable ASCII, other characters as JSON writes them, and cut."""
    return json.dumps(text)[1:-1].replace("\x7f", "?")[:MAX_WARNING].encode()


def routed(state: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the headers that tell which version of its model a request's tasks went to, and why."""
    for resolved in state.get("models", {}).values():  # one: a request has one model
        yield from _routed(str(resolved.card["version"]), resolved.alias, resolved.generation)


@lru_cache(maxsize=1024)
def _routed(version: str, alias: str, generation: int) -> tuple[tuple[bytes, bytes], ...]:
    headers = [(b"penstock-version", version.encode())]
    if alias:
        headers.append((b"penstock-alias", alias.encode("ascii", "replace")))
    if generation:
        headers.append((b"penstock-generation", b"%d" % generation))
    return tuple(headers)


def overload(state: Mapping[str, Any]) -> Iterator[tuple[bytes, bytes]]:
    """Yields the headers that tell the caller of overload, and of its effect on the request."""
    if (stage := state.get("degraded")) is not None:
        yield b"penstock-degraded", stage.encode()
    if (to := state.get("shortened_to")) is not None:
        yield b"penstock-shortened", b"%d" % to
