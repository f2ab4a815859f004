"""What every request passes first and last: its id, its count, and the answer to what nobody else caught."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from producers.gateway.http.errors import problem_of, response_of
from producers.gateway.metrics import Metrics

logger = logging.getLogger(__name__)

METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
#: A caller's own request id is taken over where it can do no harm in a log.
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:/+=-]{1,128}")


class Edge:
    """ASGI middleware; Starlette's own kind runs each response through a queue and a task, which streams would pay."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        begun = False
        method = scope["method"] if scope["method"] in METHODS else "other"
        if method == "HEAD":
            scope, send = {**scope, "method": "GET"}, _without_body(send)

        async def send_on(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                route = getattr(scope.get("route"), "path", "unmatched")
                self._metrics.answered(method, route, message["status"], time.perf_counter() - came)
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except ClientDisconnect:
            logger.info("request %s: its client left before it was read", request_id)
        except Exception as error:
            logger.exception("request %s (%s %s) failed", request_id, method, scope["path"])
            if begun:
                raise
            await response_of(problem_of(error))(scope, receive, send_on)


def _without_body(send: Send) -> Send:
    """To answer HEAD as GET is: the head of the answer, and its end at once. A stream takes that for its reader's
    leaving, and ends."""

    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body"})

    return send_head
