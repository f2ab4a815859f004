"""Spans reach a collector, or are dropped and counted; nothing waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest

from producers.contract.record import Record, TraceParent
from producers.gateway import GatewaySettings
from producers.tracing.export import Tracer, TracingError, tracer
from producers.tracing.spans import Span, TaskTrace, task_spans
from tests.collector import Collector
from tests.producers.contract.test_record import GOOD, TRACE
from tests.producers.gateway.conftest import Door
from tests.waiting import until


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def send_to(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends the traces of this process to a path of the collector."""

    def set_environment(path: str = "", **more: str) -> None:
        for name, value in (collector.environment(path) | more).items():
            monkeypatch.setenv(name, value)

    return set_environment


def span(name: str) -> Span:
    return Span(name, TRACE, "00f067aa0ba902b7", None, 1_000, 2_000)


def test_nothing_that_sends_is_imported_while_traces_are_off() -> None:
    """Redis' client imports what counts, where that is installed."""
    code = "import sys, workers.webhooks.deliverer, producers.gateway, producers.sweeper.sweeper as s; "
    code += "from producers.tracing.export import tracer; assert tracer('x') is None; "
    code += "print([name for name in sys.modules if name.startswith('opentelemetry.exporter')])"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed == "[]\n"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER is 'jaeger'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf alone"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "OTEL_BSP_MAX_QUEUE_SIZE is 'many'"),
    ],
)
def test_an_environment_that_cannot_be_followed_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    for name, value in ({"OTEL_TRACES_EXPORTER": "otlp"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TracingError, match=message):
        tracer("gateway")


def test_without_its_packages_it_says_which_extra_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"penstock\[tracing\]"):
        tracer("gateway")


@pytest.mark.parametrize("value", ["", "none", "NONE"])
def test_it_is_off_unless_it_is_turned_on(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", value)
    assert tracer("gateway") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer("gateway") is None


def test_a_trace_is_sampled_as_its_caller_has_it_and_else_by_the_ratio(
    send_to: Callable[..., None],
) -> None:
    send_to(OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.25")
    spans = Tracer("x")
    ids = [f"{number:016x}{number << 54:016x}" for number in range(1, 1024)]
    assert 0.2 < sum(spans.sampled(trace_id, None) for trace_id in ids) / len(ids) < 0.3
    assert all(spans.sampled(trace_id, TraceParent(trace_id, "1" * 16, True)) for trace_id in ids)
    assert not any(spans.sampled(trace_id, TraceParent(trace_id, "1" * 16, False)) for trace_id in ids)


def test_a_collector_that_never_answers_is_not_waited_for(collector: Collector, send_to: Callable[..., None]) -> None:
    send_to("/hang", OTEL_BSP_MAX_QUEUE_SIZE="10", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="5")
    spans = Tracer("x")
    for number in range(100):
        spans.put(span(str(number)))
    until(lambda: spans.dropped >= 85)  # it holds a call's, and those that wait
    spans.close(0.0)


def test_what_a_collector_refuses_is_counted_and_the_next_spans_are_sent(
    collector: Collector, send_to: Callable[..., None]
) -> None:
    send_to("/status/400")
    refused = Tracer("x")
    refused.put(span("refused"))
    until(lambda: refused.dropped == 1)
    send_to()
    spans = Tracer("x")
    spans.put(span("kept"))
    until(lambda: spans.exported == 1)
    assert "kept" in {received.name for received in collector.spans}
    spans.put(span("last"))
    spans.close(60.0)
    assert "last" in {received.name for received in collector.spans}
    spans.put(span("too late"))
    assert spans.dropped == 1


def test_a_request_of_the_gateway(valkey_url: str, collector: Collector, send_to: Callable[..., None]) -> None:
    """Also one that is refused, and none for a probe. Its count is a metric."""
    send_to()
    door = Door(GatewaySettings(valkey_url, valkey_url))
    try:
        for path in ("/v1/tasks/unknown-task", "/livez"):
            door.http.get(path, headers={"traceparent": GOOD, "x-request-id": "r-7"})
        door.http.get("/v1/models", headers={"traceparent": f"{GOOD[:-1]}0"})

        def requests() -> list[str]:
            return [received.name for received in collector.spans if received.kind == "server"]

        until(requests)
        metrics: httpx.Response = door.http.get("/metrics")
        assert 'penstock_gateway_spans_total{outcome="sent"} 1.0' in metrics.text
    finally:
        door.close()
    assert requests() == ["GET /v1/tasks/{task_id}"]
    (received,) = [received for received in collector.spans if received.kind == "server"]
    assert (received.trace_id, received.parent_id) == (TRACE, GOOD.split("-")[2])
    assert received.attributes["penstock.request.id"] == "r-7"
    assert received.attributes["http.response.status_code"] == 404
    assert received.resource["penstock.process"] == "gateway"


def test_numbers_that_no_span_holds_hold_up_no_other(collector: Collector, send_to: Callable[..., None]) -> None:
    send_to()
    huge, far = 10**30, str(2**53)
    lost = json.dumps([{"owner": "a", "at": huge, "entries": -huge, "start": 1, "began": huge}, {"start": huge}, 7])
    usage = json.dumps({"prompt_tokens": huge, "output_tokens": 7})
    fields = {
        "status": "completed",
        "model": "huge\ud800",
        "created": far,
        "finished": far,
        "lost": lost,
        "usage": usage,
    }
    spans = task_spans(Record.parse("t", fields), TaskTrace.of("t", fields))
    assert Tracer("x").export(spans)
    (root,) = [received for received in collector.spans if received.name.startswith("generate huge")]
    assert root.attributes["gen_ai.usage.output_tokens"] == 7
