"""A gateway's own figures, and the collector of all others at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from producers.admin.fleet import Fleet
from producers.connection.storage import Storage
from producers.gateway.metrics import pools, scaling, servers, workers
from producers.release import release
from producers.store.waiting import Pressure

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
        own: dict[str, Any] = {"namespace": "penstock", "subsystem": "gateway", "registry": self.registry}
        self._requests = Counter("requests", "Requests answered.", ("method", "route", "status"), **own)
        text = "From a request's arrival to the first byte of its answer."
        self._latency = Histogram("request_seconds", text, ("route",), buckets=BUCKETS, **own)
        self._submitted = Counter("tasks_submitted", "Tasks queued.", ("model", "tier"), **own)
        text = "Requests refused with 429 or 503: no room, or a server that fails. The reason is the error's code."
        self._refused = Counter("requests_refused", text, ("reason", "tier"), **own)
        text = "Events being read, answers being waited for, and files being downloaded."
        streams = Gauge("open_streams", text, ("kind",), **own)
        for kind in get_args(Stream):
            streams.labels(kind).set_function(partial(open_streams, kind))
        self._connections = Gauge("open_connections", "Open connections of callers, idle ones too.", **own)
        text = "Idle connections that were closed for newcomers: of an address that has its share, or of all."
        self._closed = Counter("idle_connections_closed", text, **own)
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
        yield from pools.waiting(self._metrics.waiting, self._metrics.overload)
        yield from servers.described(self._metrics.storage)
        if fleet is not None:
            yield from pools.described(fleet)
            yield from workers.described(fleet)
            yield from scaling.described(fleet)
