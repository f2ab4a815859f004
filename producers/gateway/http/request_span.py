"""The span of one request, where traces are turned on: from its arrival to the end of its answer."""

from __future__ import annotations

import secrets
import time

from starlette.types import Scope

from producers.contract.record import TraceParent
from producers.tracing.export import Tracer
from producers.tracing.spans import Moment, Span, Value


class RequestSpan:
    """`parent`: the caller's span, if it names one. Tasks of the request are in the trace of `context`."""

    def __init__(self, tracer: Tracer, parent: TraceParent | None) -> None:
        self._tracer = tracer
        self._parent = parent
        self._began, self._clock = time.time() * 1000, time.perf_counter()
        self._answered: float | None = None
        self._status = 0
        trace_id = parent.trace_id if parent is not None else secrets.token_hex(16)
        self.context = TraceParent(trace_id, secrets.token_hex(8), tracer.sampled(trace_id, parent))

    def begin_answer(self, status: int) -> None:
        """Notes the head of the answer."""
        self._answered, self._status = self._now(), status

    def end(self, scope: Scope, method: str, request_id: str, tenant: str) -> None:
        """Sends it. An answer that has not begun by now was not made: the caller left, or the handler failed."""
        if not self.context.sampled:
            return
        route = getattr(scope.get("route"), "path", "unmatched")
        attributes: dict[str, Value] = {
            "http.request.method": method,
            "http.route": route,
            "penstock.request.id": request_id,
        }
        if tenant:
            attributes["penstock.tenant"] = tenant
        events: tuple[Moment, ...] = ()
        if self._answered is not None:
            attributes["http.response.status_code"] = self._status
            events = (Moment("answer begins", self._answered),)
        error = str(self._status) if self._status >= 500 else None
        if error is not None:
            attributes["error.type"] = error
        self._tracer.put(
            Span(
                f"{method} {route}",
                self.context.trace_id,
                self.context.span_id,
                None if self._parent is None else self._parent.span_id,
                self._began,
                self._now(),
                "server",
                attributes,
                events,
                error=error,
            )
        )

    def _now(self) -> float:
        """Unix ms, which a clock that is set meanwhile does not change."""
        return self._began + 1000 * (time.perf_counter() - self._clock)
