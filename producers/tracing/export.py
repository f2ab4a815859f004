"""Sends spans to an OpenTelemetry collector, over OTLP/HTTP with protobuf.

`OTEL_TRACES_EXPORTER=otlp` turns it on. The rest of the environment is OpenTelemetry's as well (docs/run/tracing.md has
the names that matter): endpoint, headers, certificates, sampler, resource.

Nothing waits for the collector. `put` drops a span where the queue is full, and counts it; a thread sends the others.
Only `export` waits, and is for threads that nobody waits for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from producers.connection.log_throttle import Throttle, warn_throttled
from producers.contract.record import TraceParent
from producers.errors import PenstockError
from producers.release import release
from producers.tracing.spans import Span, Value

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
#: Longest time (s) for which a process that ends still sends spans.
CLOSE_S: Final = 2.0
#: Name -> default of numbers in the environment: spans that wait at most, time (ms) between two calls, spans of a call.
NUMBERS: Final = {
    "OTEL_BSP_MAX_QUEUE_SIZE": 2048,
    "OTEL_BSP_SCHEDULE_DELAY": 5000,
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": 512,
}
#: Longest text of a span, in characters.
MAX_TEXT: Final = 256
log = logging.getLogger(__name__)


class TracingError(PenstockError, ValueError):
    """Traces or metrics are asked for, and cannot be sent as the environment says."""


def tracer(service: str) -> Tracer | None:
    """The process' Tracer; None unless the environment turns traces on. `service`: the part of Penstock that it is.

    Raises TracingError for settings that cannot be followed, and if the packages of the extra `tracing` are missing.
    """
    if not turned_on("traces"):
        return None
    with refused("traces"):
        return Tracer(service)


def turned_on(signal: str) -> bool:
    """Whether the environment asks for a signal of OpenTelemetry: `traces` or `metrics`. Raises TracingError for an
    exporter or a protocol that Penstock does not have."""
    switch, protocols = f"OTEL_{signal.upper()}_EXPORTER", (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", PROTOCOL)
    exporter = os.environ.get(switch, "").strip().lower()
    if exporter in ("", "none") or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if exporter != "otlp":
        raise TracingError(f"{switch} is {exporter!r}; Penstock sends {signal} by otlp alone (none turns them off)")
    protocol = next((os.environ[name] for name in protocols if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise TracingError(
            f"{PROTOCOL} is {protocol!r}; Penstock sends {signal} by http/protobuf alone, which collectors take at "
            "port 4318"
        )
    return True


@contextmanager
def refused(signal: str) -> Iterator[None]:
    """Say by a TracingError why a signal's exporter cannot be made."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise TracingError(
            f"OTEL_{signal.upper()}_EXPORTER=otlp needs {error.name}; it comes with: pip install 'penstock[tracing]'"
        ) from error
    except (ValueError, OSError) as error:
        raise TracingError(f"{signal} cannot be sent as the environment (OTEL_*) says: {error}") from error


def resource(process: str) -> Resource:
    """The attributes of a part of Penstock: those of the environment, `penstock.process`, and a service's name.

    Raises ModuleNotFoundError."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource

    named = bool(os.environ.get("OTEL_SERVICE_NAME")) or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    return Resource.create({"penstock.process": process} | ({} if named else {SERVICE_NAME: "penstock"}))


class Tracer:
    """Samples and sends spans. Any thread. `service`: the part of Penstock whose spans they are.

    Raises ModuleNotFoundError, ValueError or OSError for what the environment asks and this process cannot do.
    """

    def __init__(self, service: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._limit, delay_ms, self._batch = (whole(name, default) for name, default in NUMBERS.items())
        self._delay_s = delay_ms / 1000
        provider = TracerProvider(shutdown_on_exit=False)  # it reads OTEL_TRACES_SAMPLER
        self._sampler = provider.sampler
        self._resource = resource(service)
        self._scope = InstrumentationScope("penstock", release())
        self._exporter = OTLPSpanExporter()
        for name in (
            "opentelemetry.exporter.otlp.proto.http.trace_exporter",
            "opentelemetry.exporter.otlp.common.http",
        ):
            throttle(name)
        self._queue: deque[Span] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.exported = 0
        """Spans that a collector has taken."""
        self.dropped = 0
        """Spans that were put, and are not sent: the collector is away, or slower than they come."""

    def sampled(self, trace_id: str, parent: TraceParent | None) -> bool:
        """Whether a trace is sent, as OTEL_TRACES_SAMPLER decides: unless it says otherwise, as the caller has it, and
        always without a caller's."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        context = None
        if parent is not None:
            ids = int(parent.trace_id, 16), int(parent.span_id, 16)
            context = set_span_in_context(NonRecordingSpan(SpanContext(*ids, True, TraceFlags(parent.sampled))))
        return (
            self._sampler.should_sample(context, int(trace_id, 16), "penstock").decision is Decision.RECORD_AND_SAMPLE
        )

    def put(self, span: Span) -> None:
        """Send a span soon, or drop it. Never waits."""
        with self._changed:
            if len(self._queue) >= self._limit or self._closing:
                self.dropped += 1
                return
            self._queue.append(span)
            if self._thread is None:  # in the process that sends, which may be a fork of the one that was configured
                self._thread = threading.Thread(target=self._run, name="penstock-spans", daemon=True)
                self._thread.start()
            if len(self._queue) == 1 or len(self._queue) >= self._batch:
                self._changed.notify()

    def export(self, spans: Sequence[Span]) -> bool:
        """Send spans, and wait. Returns whether the collector took them all."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        for start in range(0, len(spans), self._batch):
            part = [self._readable(span) for span in spans[start : start + self._batch]]
            if self._exporter.export(part) is not SpanExportResult.SUCCESS:
                return False
        return True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send what waits, as far as that takes no longer than this (s), and take no more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                until = time.monotonic() + self._delay_s
                while not self._closing and len(self._queue) < self._batch and (pause := until - time.monotonic()) > 0:
                    self._changed.wait(pause)
                batch = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
            accepted = False
            with suppress(Exception):  # of what a span of ours may be, none ends the thread
                accepted = self.export(batch)
            with self._changed:
                self.exported += len(batch) if accepted else 0
                self.dropped += 0 if accepted else len(batch)
            if not accepted:
                warn_throttled(log, "%d spans are dropped: the collector did not take them", len(batch))

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(trace_id: str, span_id: str) -> SpanContext:
            return SpanContext(int(trace_id, 16), int(span_id, 16), False, TraceFlags(TraceFlags.SAMPLED))

        return ReadableSpan(
            _text(span.name),
            context(span.trace_id, span.span_id),
            None if span.parent_id is None else context(span.trace_id, span.parent_id),
            self._resource,
            _bounded(span.attributes),
            [Event(moment.name, _bounded(moment.attributes), _ns(moment.at)) for moment in span.events],
            [Link(context(*ids), {"penstock.reason": why}) for *ids, why in span.links],
            SpanKind[span.kind.upper()],
            status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, _text(span.error)),
            start_time=_ns(span.start),
            end_time=_ns(max(span.start, span.end)),
            instrumentation_scope=self._scope,
        )


def _bounded(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes as collectors take them."""
    return {name: _bounded_value(value) for name, value in attributes.items()}


def _bounded_value(value: Value) -> Value:
    if isinstance(value, list):
        return [_text(entry) for entry in value]
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """At most MAX_TEXT characters, which UTF-8 can have."""
    return text[:MAX_TEXT].encode(errors="replace").decode()


def _ns(ms: float) -> int:
    """Unix nanoseconds, of 64 bits."""
    return min(max(0, int(ms * 1e6)), 2**63 - 1)


def whole(name: str, default: int) -> int:
    """A whole number of the environment, from 1 on. Raises ValueError."""
    raw = os.environ.get(name) or str(default)
    if not (raw.isascii() and raw.isdecimal() and int(raw[:10]) >= 1 and len(raw) <= 10):
        raise ValueError(f"{name} is {raw!r}; it must be a whole number from 1 on")
    return int(raw)


def throttle(name: str) -> None:
    """Let a logger say the same only now and then: a collector that is away fails each call."""
    logger = logging.getLogger(name)
    if not any(isinstance(rule, Throttle) for rule in logger.filters):
        logger.addFilter(Throttle())
