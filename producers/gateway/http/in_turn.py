"""The outermost middleware: each request begins when it is its caller's turn, and its time is charged to its caller.

It stands outside of what answers requests by itself, as CORS does preflights.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine
from typing import Any, Final, cast

from starlette.types import ASGIApp, Receive, Scope, Send

from producers.gateway.fair_share import IDLE_TALK, SHARE, FairShare, Measured
from producers.gateway.http.authorization import caller_of
from producers.gateway.http.connection import connection_of
from producers.gateway.http.errors import too_many_open, too_many_waiting
from producers.gateway.http.streams import STOP

#: Paths that ask for this process's health alone. They wait in lines of their own: a prober may share its address.
PROBES: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})
#: Paths of pages for people with a browser, who need no key; files below the second one.
PAGES: Final = ("/", "/docs", "/openapi.json")
#: Names in a request's state: of the Problem with which the edge refuses it, where its caller has as many requests as
#: may be; and where it was refused (4xx), by whomever.
FULL, REFUSED = "full_line", "refused"
#: The part of all connections on which one caller may have requests under way: bodies that come slowly, answers that
#: are taken slowly. Streams have smaller bounds (`producers.gateway.http.streams`).
PART: Final = 2


class InTurn:
    """ASGI middleware. `connections`: the most that the gateway takes."""

    def __init__(self, app: ASGIApp, fair_share: FairShare, connections: int) -> None:
        self._app = app
        self._fair_share = fair_share
        self._most = max(1, connections // PART)

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
            if share.open > self._most:
                state[FULL] = too_many_open(self._most)
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
            if counts:  # now it is known whose a key is that came for the first time
                self._fair_share.seen(caller_of(scope), time.monotonic())


def _is_page(path: str) -> bool:
    return path in PAGES or path.startswith(f"{PAGES[1]}/")
