"""`/metrics`, in Prometheus' text format: this gateway's own figures, and those of all pools.

Labels are bounded: routes by their templates, models and pools by what is deployed, workers by those alive. Every
gateway reports the same for the pools: take `max by (pool)` over gateways, not the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Final

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from producers.admin.fleet import Fleet, read_fleet
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S

#: Latency buckets (s), fine in the range that an interactive caller notices.
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

#: (name, help, key in the worker's lease, whether it is a counter).
WORKER_FIGURES: Final = (
    ("running", "Sequences that a worker is generating.", "running", False),
    ("waiting", "Sequences that a worker has taken and not yet begun.", "waiting", False),
    ("capacity", "Sequences that a worker can generate at once.", "capacity", False),
    ("kv_blocks_used", "Blocks of a worker's KV cache that sequences hold.", "kv_blocks_used", False),
    ("kv_blocks", "Blocks of a worker's KV cache.", "kv_blocks_total", False),
    ("prompt_tokens", "Prompt tokens that a worker has taken in.", "prompt_tokens", True),
    ("cached_tokens", "Prompt tokens that a worker found in its prefix cache.", "cached_tokens", True),
    ("generated_tokens", "Tokens that a worker has generated.", "generated_tokens", True),
    ("preemptions", "Sequences that a worker has put off for others.", "preemptions", True),
    ("out_of_memory", "Steps for which a worker's device had no memory.", "out_of_memory", True),
    ("not_finite", "Sequences that failed because a worker's model gave NaN or infinity.", "not_finite", True),
    ("drafted_tokens", "Tokens that a worker guessed ahead (speculative decoding).", "drafted", True),
    ("draft_accepted_tokens", "Of these, those that were right.", "draft_accepted", True),
)
#: The same for a worker's GPU, as far as its driver reports it; keys are within the lease's `gpu`.
GPU_FIGURES: Final = (
    ("memory_bytes", "Memory of a worker's GPU.", "memory_bytes", False),
    ("memory_used_bytes", "Memory of a worker's GPU that is taken, by whomever.", "memory_used_bytes", False),
    (
        "utilization_ratio",
        "Share of the last moments in which a worker's GPU ran anything.",
        "utilization_ratio",
        False,
    ),
    ("temperature_celsius", "Temperature of a worker's GPU.", "temperature_celsius", False),
    ("power_watts", "Power that a worker's GPU draws.", "power_watts", False),
    ("power_limit_watts", "Power that a worker's GPU may draw.", "power_limit_watts", False),
    ("sm_clock_hertz", "Clock of the processors of a worker's GPU.", "sm_clock_hertz", False),
    ("memory_clock_hertz", "Clock of the memory of a worker's GPU.", "memory_clock_hertz", False),
    ("ecc_corrected_errors", "Memory errors that were corrected, since the driver was loaded.", "ecc_corrected", True),
    ("ecc_uncorrected_errors", "Memory errors that were not.", "ecc_uncorrected", True),
)
#: The tier label of requests that were refused before their tier was known, or that have none.
UNKNOWN: Final = "unknown"


class Metrics:
    """One gateway's figures. `open_streams` returns the number of open streams."""

    def __init__(self, open_streams: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.fleet: Fleet | None = None
        ProcessCollector(registry=self.registry)
        self._requests = Counter(
            "penstock_gateway_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self._latency = Histogram(
            "penstock_gateway_request_seconds",
            "From a request's arrival to the first byte of its answer.",
            ("route",),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._submitted = Counter(
            "penstock_gateway_tasks_submitted", "Tasks queued.", ("model", "tier"), registry=self.registry
        )
        self._refused = Counter(
            "penstock_gateway_requests_refused",
            "Requests refused with 429 or 503: no room, or a server that fails. The reason is the error's code.",
            ("reason", "tier"),
            registry=self.registry,
        )
        streams = Gauge(
            "penstock_gateway_open_streams", "Streams being read, and answers being waited for.", registry=self.registry
        )
        streams.set_function(open_streams)
        self.registry.register(_FleetCollector(self))

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
        if fleet is not None:
            yield from _describe(fleet)


def _describe(fleet: Fleet) -> Iterator[Metric]:
    for name, text, left in (
        ("tasks_submitting", "Tasks recorded and not yet confirmed by the broker", fleet.submitting),
        ("tasks_unsettled", "Tasks that are final, and whose message nobody has put down yet", fleet.unsettled),
        ("streams_to_compact", "Streams of settled tasks that are not compacted yet", fleet.to_compact),
    ):
        yield GaugeMetricFamily(f"penstock_{name}", f"{text}.", left.count)
        yield GaugeMetricFamily(f"penstock_{name}_oldest_seconds", f"{text}: since when the first is.", left.oldest_s)
    yield GaugeMetricFamily("penstock_sweeper_leads", "Whether a sweeper leads.", fleet.sweeper_leads)
    swept = CounterMetricFamily("penstock_swept", "What sweepers did.", labels=("what",))
    for what, count in sorted(fleet.swept.items()):
        swept.add_metric((what,), count)
    yield swept
    yield GaugeMetricFamily("penstock_dead_letters", "Messages that no worker could use.", fleet.dead_letters)
    rows = GaugeMetricFamily("penstock_webhook_rows", "Deliveries of events to webhooks.", labels=("state",))
    for state, count in fleet.webhooks.rows.items():
        rows.add_metric((state,), count)
    yield rows
    yield GaugeMetricFamily(
        "penstock_webhook_oldest_due_seconds",
        "For how long the oldest delivery has been due that nobody took.",
        fleet.webhooks.oldest_due_s,
    )
    queued = GaugeMetricFamily("penstock_queued", "Tasks waiting for a worker.", labels=("model", "pool", "tier"))
    tenants = GaugeMetricFamily(
        "penstock_queued_tenants", "Tenants whose tasks wait for their turn.", labels=("model", "pool", "tier")
    )
    oldest = GaugeMetricFamily(
        "penstock_queued_oldest_seconds",
        "Since the task that waits longest was submitted; not for plain Celery tasks.",
        labels=("model", "pool", "tier"),
    )
    delayed = GaugeMetricFamily("penstock_delayed", "Tasks to be offered again later.", labels=("model", "pool"))
    in_flight = GaugeMetricFamily("penstock_in_flight", "Tasks that workers have taken.", labels=("model", "pool"))
    workers = GaugeMetricFamily("penstock_workers", "Workers with a live lease.", labels=("model", "pool"))
    for pool in fleet.pools:
        for tier, waiting in pool.queued.items():
            queued.add_metric((pool.model, pool.name, tier), waiting)
            tenants.add_metric((pool.model, pool.name, tier), pool.tenants[tier])
            if not waiting or tier in pool.oldest_s:
                oldest.add_metric((pool.model, pool.name, tier), pool.oldest_s.get(tier, 0.0))
        delayed.add_metric((pool.model, pool.name), pool.delayed)
        in_flight.add_metric((pool.model, pool.name), pool.in_flight)
        workers.add_metric((pool.model, pool.name), len(pool.workers))
    yield from (queued, tenants, oldest, delayed, in_flight, workers)
    for name, text, key, grows in WORKER_FIGURES:
        family = CounterMetricFamily if grows else GaugeMetricFamily
        figures = family(f"penstock_worker_{name}", text, labels=("model", "pool", "worker"))
        for pool in fleet.pools:
            for worker in pool.workers:
                if key in worker:  # a worker of another version may lack it
                    figures.add_metric((pool.model, pool.name, worker["worker"]), worker[key])
        yield figures
    ready = GaugeMetricFamily(
        "penstock_worker_ready",
        "0 while a worker drains or says that something is wrong with it.",
        labels=("model", "pool", "worker"),
    )
    for pool in fleet.pools:
        for worker in pool.workers:
            well = not (worker.get("draining") or worker.get("unready"))
            ready.add_metric((pool.model, pool.name, worker["worker"]), well)
    yield ready
    yield from _describe_gpus(fleet)


def _describe_gpus(fleet: Fleet) -> Iterator[Metric]:
    having = [(pool, worker, worker["gpu"]) for pool in fleet.pools for worker in pool.workers if "gpu" in worker]
    for name, text, key, grows in GPU_FIGURES:
        family = CounterMetricFamily if grows else GaugeMetricFamily
        figures = family(f"penstock_worker_gpu_{name}", text, labels=("model", "pool", "worker", "gpu"))
        for pool, worker, gpu in having:
            if key in gpu:
                figures.add_metric((pool.model, pool.name, worker["worker"], gpu["uuid"]), gpu[key])
        yield figures
    slowed = GaugeMetricFamily(
        "penstock_worker_gpu_slowed",
        "1 for each reason that keeps the clocks of a worker's GPU down.",
        labels=("model", "pool", "worker", "gpu", "reason"),
    )
    for pool, worker, gpu in having:
        for reason in gpu.get("slowed_by", ()):
            slowed.add_metric((pool.model, pool.name, worker["worker"], gpu["uuid"], reason), 1)
    yield slowed


router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' format. It answers also while store or broker is away: see `penstock_up`."""
    gateway = request.app.state.gateway
    try:
        async with asyncio.timeout(SILENT_S):  # Prometheus waits for 10 s
            gateway.metrics.fleet = await read_fleet(gateway.client.store, gateway.client.broker)
    except FAILURES:
        gateway.metrics.fleet = None
    return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)
