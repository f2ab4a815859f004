"""An OpenTelemetry collector as a process: it takes OTLP over HTTP in protobuf, and answers as the URL's path says.

/v1/traces, /v1/metrics 200    /hang/... no answer    /status/N/... N
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.receiver import Process


@dataclass(frozen=True, slots=True)
class Received:
    """A span that the collector took. Ids are in hexadecimal, times unix ns."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    links: list[str]
    error: str | None
    resource: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReceivedPoint:
    """A point of a histogram that the collector took. Times are unix ns."""

    name: str
    unit: str
    temporality: str
    attributes: dict[str, Any]
    since: int
    at: int
    count: int
    sum: float
    bounds: list[float]
    counts: list[int]
    extremes: bool
    resource: dict[str, Any]


#: What begins a line of the log that is a point.
POINT = "point "
WRITING = threading.Lock()


class Collector(Process):
    def __init__(self) -> None:
        super().__init__("tests.collector")
        self.port = int(self.until(lambda: next(filter(str.isdecimal, self.log.read_text().split("\n")[:-1]), "")))

    def environment(self, path: str = "") -> dict[str, str]:
        """The environment of a process that is to send its traces and metrics here."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}{path}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    @property
    def spans(self) -> list[Received]:
        """All spans that it has taken."""
        return [Received(**json.loads(line)) for line in self._lines() if line.startswith("{")]

    @property
    def points(self) -> list[ReceivedPoint]:
        """All points of histograms that it has taken."""
        lines = [line.removeprefix(POINT) for line in self._lines() if line.startswith(POINT)]
        return [ReceivedPoint(**json.loads(line)) for line in lines]

    def _lines(self) -> list[str]:
        lines = self.log.read_text().splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        status = 200
        if self.path.startswith("/hang"):
            time.sleep(3600)
        elif self.path.startswith("/status/"):
            status = int(self.path.split("/")[2])
        else:
            assert self.headers["content-type"] == "application/x-protobuf"
            points = self.path.endswith("/v1/metrics")
            for line in _decoded_points(body) if points else _decoded(body):
                with WRITING:
                    print(f"{POINT if points else ''}{json.dumps(line)}", flush=True)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print spans and points alone."""


def values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _decoded_points(body: bytes) -> list[dict[str, Any]]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

    return [
        {
            "name": metric.name,
            "unit": metric.unit,
            "temporality": AggregationTemporality.Name(metric.histogram.aggregation_temporality),
            "attributes": values(point.attributes),
            "since": point.start_time_unix_nano,
            "at": point.time_unix_nano,
            "count": point.count,
            "sum": point.sum,
            "bounds": [*point.explicit_bounds],
            "counts": [*point.bucket_counts],
            "extremes": point.HasField("min") or point.HasField("max"),
            "resource": values(resource_metrics.resource.attributes),
        }
        for resource_metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope_metrics in resource_metrics.scope_metrics
        for metric in scope_metrics.metrics
        for point in metric.histogram.data_points
    ]


def _decoded(body: bytes) -> list[dict[str, Any]]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    return [
        {
            "name": span.name,
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_id": span.parent_span_id.hex(),
            "kind": Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
            "start": span.start_time_unix_nano,
            "end": span.end_time_unix_nano,
            "attributes": values(span.attributes),
            "events": [(event.name, event.time_unix_nano) for event in span.events],
            "links": [link.span_id.hex() for link in span.links],
            "error": span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
            "resource": values(resource_spans.resource.attributes),
        }
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    sys.stdout.flush()
    server.serve_forever()
