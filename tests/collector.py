"""An OpenTelemetry collector as a process: it takes OTLP over HTTP in protobuf, and answers as the URL's path says.

/v1/traces 200    /hang/v1/traces no answer    /status/N/v1/traces N
"""

from __future__ import annotations

import json
import sys
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


class Collector(Process):
    def __init__(self) -> None:
        super().__init__("tests.collector")
        self.port = int(self.until(lambda: next(filter(str.isdecimal, self.log.read_text().split("\n")[:-1]), "")))

    def environment(self, path: str = "") -> dict[str, str]:
        """The environment of a process that is to send its traces here."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}{path}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    @property
    def spans(self) -> list[Received]:
        """All spans that it has taken."""
        lines = self.log.read_text().splitlines(keepends=True)
        return [Received(**json.loads(line)) for line in lines if line.startswith("{") and line.endswith("\n")]


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
            for line in _decoded(body):
                print(json.dumps(line), flush=True)
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Print spans alone."""


def _decoded(body: bytes) -> list[dict[str, Any]]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    def values(pairs: Any) -> dict[str, Any]:
        return {pair.key: _value(pair.value) for pair in pairs}

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
