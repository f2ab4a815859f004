"""Sends OpenTelemetry's GenAI metrics to a collector, where `OTEL_METRICS_EXPORTER=otlp` asks for them.

    a final end ─▶ row of the ledger ─ count_ended ─▶ `penstock:metrics:model:<model>` ─ sweep ─▶ OTLP/HTTP

The sums are those of `producers.store.measurements`, from which every gateway exports Prometheus' histograms, too. The
sweeper that leads sends them, so they come once. They are cumulative: a call that is sent twice, or that a collector
misses, counts nothing twice and loses nothing. A mark in the store has the time since which each model's sums count, so
that the next leader's calls go on with the same series. It is read before the sums, and so is the clock: what a process
sends that has stood still meanwhile is older, and ends no series.

| dies after | state | who repairs it |
| --- | --- | --- |
| the mark was written | the collector has older sums | the next leader sends all of them |
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from producers.client.aio import AsyncClient
from producers.connection.script import aexecute, aexecute_many, parsed, text
from producers.contract import keys
from producers.release import release
from producers.store.measurements import (
    GEN_AI,
    GEN_AI_FAILED,
    GEN_AI_FIRST_TOKEN,
    GEN_AI_PER_TOKEN,
    GEN_AI_REQUEST,
    KEPT_S,
    Histogram,
    read_measurements,
)
from producers.tracing.export import refused, resource, throttle, turned_on, whole

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import HistogramDataPoint, MetricsData

#: The name of the mark (`keys.metrics_mark`): model -> [since when its sums count (unix ms), their observations].
SOURCE: Final = "gen_ai"
#: Time (ms) between two calls, unless the environment says otherwise.
INTERVAL: Final = ("OTEL_METRIC_EXPORT_INTERVAL", 60_000)
TEMPORALITY: Final = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
#: Time (s) for which a sweep waits for an answer.
ANSWER_S: Final = 15.0
#: Metric -> its histograms in the store, each with the `error.type` of its tasks.
METRICS: Final[Mapping[str, tuple[tuple[Histogram, str], ...]]] = {
    GEN_AI_FIRST_TOKEN.name: ((GEN_AI_FIRST_TOKEN, ""),),
    GEN_AI_PER_TOKEN.name: ((GEN_AI_PER_TOKEN, ""),),
    GEN_AI_REQUEST.name: ((GEN_AI_REQUEST, ""), (GEN_AI_FAILED, "failed")),
}


def metrics_exporter() -> MetricsExporter | None:
    """The process' exporter; None unless the environment turns metrics on.

    Raises TracingError for settings that cannot be followed, and if the packages of the extra `tracing` are missing.
    """
    if not turned_on("metrics"):
        return None
    with refused("metrics"):
        return MetricsExporter()


class MetricsExporter:
    """Sends metrics of the whole system. Its attributes are the same in each process that may lead.

    Raises ModuleNotFoundError, ValueError or OSError for what the environment asks and this process cannot do."""

    def __init__(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        preference = os.environ.get(TEMPORALITY, "").strip().lower()
        if preference not in ("", "cumulative"):
            raise ValueError(f"{TEMPORALITY} is {preference!r}; Penstock's metrics are cumulative")
        self.every_s = whole(*INTERVAL) / 1000
        """Time (s) between two calls."""
        attributes = dict(resource("system").attributes)
        if f"{SERVICE_INSTANCE_ID}=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
            attributes.pop(SERVICE_INSTANCE_ID, None)  # another one in each process
        self._resource = Resource(attributes)
        self._scope = InstrumentationScope("penstock", release())
        self._exporter = OTLPMetricExporter()
        for name in (
            "opentelemetry.exporter.otlp.proto.http.metric_exporter",
            "opentelemetry.exporter.otlp.common.http",
        ):
            throttle(name)

    def export(self, points: Mapping[str, list[HistogramDataPoint]]) -> bool:
        """Send metrics by their names, and wait. Returns whether the collector took them."""
        from opentelemetry.sdk.metrics.export import MetricExportResult

        return self._exporter.export(self._data(points)) is MetricExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _data(self, points: Mapping[str, list[HistogramDataPoint]]) -> MetricsData:
        from opentelemetry.sdk.metrics import export

        metrics = [
            export.Metric(
                name,
                METRICS[name][0][0].text,
                "s",
                export.Histogram(its_points, export.AggregationTemporality.CUMULATIVE),
            )
            for name, its_points in points.items()
        ]
        scope = export.ScopeMetrics(self._scope, metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])


class GenAiMetrics:
    """`sweep` it every `exporter.every_s`. One for a process; `close` it."""

    def __init__(self, client: AsyncClient, exporter: MetricsExporter) -> None:
        self._store = client.store
        self._exporter = exporter
        self._sender = ThreadPoolExecutor(1, "penstock-metrics")
        self._sending: asyncio.Future[bool] | None = None

    @property
    def every_s(self) -> float:
        """Time (s) between two calls."""
        return self._exporter.every_s

    def close(self) -> None:
        """Wait for no call that is under way."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._exporter.close()

    async def sweep(self) -> dict[str, int]:
        """Send the sums. Answers how many calls a collector did not take. A call that has no answer yet is left alone,
        and none is made beside it. Raises redis.exceptions.RedisError or OSError."""
        if self._sending is not None and not self._sending.done():
            return {"metrics_unsent": 1}
        points = await self._points()
        if not points:
            return {}
        self._sending = asyncio.get_running_loop().run_in_executor(self._sender, self._exporter.export, points)
        await asyncio.wait((self._sending,), timeout=ANSWER_S)
        accepted = self._sending.done() and self._sending.result()
        return {} if accepted else {"metrics_unsent": 1}

    async def _points(self) -> dict[str, list[HistogramDataPoint]]:
        """Metric -> its points; none without observations."""
        before = parsed(await aexecute(self._store, "GET", keys.metrics_mark(SOURCE)))
        seconds, micros = await aexecute(self._store, "TIME")
        now = int(seconds) * 1000 + int(micros) // 1000
        sums = await read_measurements(self._store)
        flat: Any = await aexecute(self._store, "HGETALL", keys.MODELS)
        cards = {text(name): parsed(card) for name, card in zip(flat[::2], flat[1::2], strict=True)}
        since = await self._since(before, sums, now)
        points: dict[str, list[HistogramDataPoint]] = {}
        for model, fields in sums.items():
            attributes = {
                "gen_ai.operation.name": "embeddings" if cards.get(model, {}).get("pooling") else "text_completion",
                "gen_ai.provider.name": "penstock",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
            }
            for name, histograms in METRICS.items():
                for histogram, error in histograms:
                    its_attributes = attributes | ({"error.type": error} if error else {})
                    points.setdefault(name, []).extend(
                        _histogram_points(histogram, fields, its_attributes, since.get(model, now), now)
                    )
        return {name: its_points for name, its_points in points.items() if its_points}

    async def _since(
        self, before: Mapping[str, Any], sums: Mapping[str, Mapping[str, int]], now: int
    ) -> dict[str, int]:
        """Model -> since when (unix ms) its sums count: the first call of whomever, or the first after they had
        fallen, because they were removed. `before`: the mark. A model without a card keeps its own as long as its
        sums are there: it may come again."""
        absent = [model for model in before if model not in sums]
        there = await aexecute_many(self._store, [("EXISTS", keys.metrics(model)) for model in absent])
        since = {model: _mark(before[model], now) for model, kept in zip(absent, there, strict=True) if kept}
        for model, fields in sums.items():
            if count := sum(sum(_counts(histogram, tier, fields)) for histogram in GEN_AI for tier in keys.TIERS):
                start, earlier = _mark(before.get(model), now)
                since[model] = (start if count >= earlier else now), count
        await aexecute(self._store, "SET", keys.metrics_mark(SOURCE), json.dumps(since), "EX", KEPT_S)
        return {model: start for model, (start, _) in since.items()}


def _mark(value: Any, now: int) -> tuple[int, int]:
    """A model's entry of the mark: as if it began now, for one that cannot be read."""
    match value:
        case [int(start), int(count)] if 0 < start <= now and count >= 0:
            return start, count
    return now, 0


def _counts(histogram: Histogram, tier: str, fields: Mapping[str, int]) -> list[int]:
    """The observations of each bucket."""
    return [fields.get(f"{histogram.name} {tier} {bound}", 0) for bound in histogram.buckets]


def _histogram_points(
    histogram: Histogram, fields: Mapping[str, int], attributes: Mapping[str, str], since: int, now: int
) -> Iterator[HistogramDataPoint]:
    """A point for each tier that has observations. Times: unix ms."""
    from opentelemetry.sdk.metrics.export import HistogramDataPoint

    for tier in keys.TIERS:
        counts = _counts(histogram, tier, fields)
        if any(counts):
            yield HistogramDataPoint(
                attributes={**attributes, "penstock.tier": tier},
                start_time_unix_nano=since * 1_000_000,
                time_unix_nano=now * 1_000_000,
                count=sum(counts),
                sum=fields.get(f"{histogram.name} {tier} sum", 0) / histogram.scale,
                bucket_counts=counts,
                explicit_bounds=histogram.bounds,
                min=None,  # type: ignore[arg-type]  # unknown, which OTLP allows and the SDK's types do not
                max=None,  # type: ignore[arg-type]
            )
