"""`/metrics`, in Prometheus' text format: this gateway's own figures, and those of all pools.

    GET /metrics ─▶ read_fleet ─▶ Metrics: requests of this gateway
                                  fleet_metrics: queues, sweepers, workers' leases, the autoscaler's decisions, profiles
                    PRESSURE   ─▶ fleet_metrics: the store's counts of what waits, and the overload that follows
                    INFO       ─▶ fleet_metrics: how full store and broker are

Labels are bounded: routes by their templates, models and pools by what is deployed, workers by those alive. Every
gateway reports the same for the pools: take `max by (pool)` over gateways, not the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, get_args

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from producers.admin.fleet import Fleet, read_fleet
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.connection.storage import Storage, read_storage
from producers.gateway.fleet_metrics import (
    pool_metrics,
    scaling_metrics,
    server_metrics,
    waiting_metrics,
    worker_metrics,
)
from producers.release import release
from producers.store.waiting import Pressure, queues

router = APIRouter(tags=["health"])
#: Latency buckets (s), fine in the range that an interactive caller notices.
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: The tier label of requests that were refused before their tier was known, or that have none.
UNKNOWN: Final = "unknown"
#: What a stream is: events of a task, an answer that is waited for, a file.
Stream = Literal["events", "answer", "download"]


class Metrics:
    """One gateway's figures. `open_streams` returns the number of open streams of a kind."""

    def __init__(self, open_streams: Callable[[Stream], int]) -> None:
        self.registry = CollectorRegistry()
        self.fleet: Fleet | None = None
        self.waiting: Mapping[str, Mapping[str, int]] = {}
        self.overload: Mapping[str, Pressure] = {}
        """Queue -> kind -> tasks that wait there; queue -> its pressure."""
        self.storage: Mapping[str, Storage] = {}
        """`store` and, where it is another server, `broker` -> how full it is."""
        ProcessCollector(registry=self.registry)
        options: dict[str, Any] = {"namespace": "penstock", "subsystem": "gateway", "registry": self.registry}
        self._requests = Counter("requests", "Requests answered.", ("method", "route", "status"), **options)
        text = "From a request's arrival to the first byte of its answer."
        self._latency = Histogram("request_seconds", text, ("route",), buckets=BUCKETS, **options)
        self._submitted = Counter("tasks_submitted", "Tasks queued.", ("model", "tier"), **options)
        text = "Requests refused with 429 or 503: no room, or a server that fails. The reason is the error's code."
        self._refused = Counter("requests_refused", text, ("reason", "tier"), **options)
        text = "Events being read, answers being waited for, and files being downloaded."
        streams = Gauge("open_streams", text, ("kind",), **options)
        for kind in get_args(Stream):
            streams.labels(kind).set_function(partial(open_streams, kind))
        self._connections = Gauge("open_connections", "Open connections of callers, idle ones too.", **options)
        text = "Idle connections that were closed for newcomers: of an address that has its share, or of all."
        self._closed = Counter("idle_connections_closed", text, **options)
        text = "1; its label `release` names this gateway's release of Penstock."
        Info("penstock_build", text, registry=self.registry).info({"release": release()})
        self.registry.register(_FleetCollector(self))

    def connections(self, count: Callable[[], int]) -> None:
        """Report a server's open connections, from now on, as `count` gives them."""
        self._connections.set_function(count)

    def closed_idle(self) -> None:
        """Count an idle connection that was closed for a newcomer."""
        self._closed.inc()

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response that has begun. `route`: the route's template, never the URL."""
        self._requests.labels(method, route, status).inc()
        self._latency.labels(route).observe(seconds)

    def submitted(self, model: str, tier: str) -> None:
        self._submitted.labels(model, tier).inc()

    def refused(self, reason: str, tier: str = UNKNOWN) -> None:
        """Count a refused task. `reason`: the error's code. No model label, since callers can make names up."""
        self._refused.labels(reason, tier).inc()


class _FleetCollector(Collector):
    """Collects the figures of all pools as last read; none if they could not be read."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        fleet = self._metrics.fleet
        up = GaugeMetricFamily("penstock_up", "Whether the store and the broker could be read.")
        up.add_metric((), fleet is not None)
        yield up
        yield from waiting_metrics(self._metrics.waiting, self._metrics.overload)
        yield from server_metrics(self._metrics.storage)
        if fleet is not None:
            yield from pool_metrics(fleet)
            yield from worker_metrics(fleet)
            yield from scaling_metrics(fleet)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' format. It answers also while store or broker is away: see `penstock_up`."""
    gateway = request.app.state.gateway
    figures = gateway.metrics
    try:
        async with asyncio.timeout(SILENT_S):  # Prometheus waits for 10 s
            figures.fleet = await read_fleet(gateway.client.store, gateway.client.broker)
            figures.waiting = await queues(gateway.client.store)
            figures.overload = await gateway.admission.overload.all(gateway.client.reserved)
            figures.storage = await read_servers(gateway.client)
    except FAILURES:
        figures.fleet, figures.waiting, figures.overload, figures.storage = None, {}, {}, {}
    return Response(generate_latest(figures.registry), media_type=CONTENT_TYPE_LATEST)


async def read_servers(client: AsyncClient) -> dict[str, Storage]:
    """The storage of the store, and of a broker that is another server, by their names. The store is asked by
    connections that callers' requests never take. Raises redis.exceptions.RedisError or OSError."""
    servers = {"store": await read_storage(client.reserved)}
    broker = None if client.one_server else await client.broker.storage()
    return servers if broker is None else servers | {"broker": broker}
