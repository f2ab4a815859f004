"""`/metrics`, in Prometheus' text format: this gateway's own figures, and those of all pools, workers and servers.

    GET /metrics ─▶ read_fleet ─▶ requests of this gateway; queues, sweepers, workers' leases, decisions, profiles
                    PRESSURE   ─▶ the store's counts of waiting tasks, and the overload that follows
                    INFO       ─▶ how full store and broker are
                    HGETALL    ─▶ counters and histograms of each model, and of event sources, which nothing takes back

A family has a name, a help text, and a row for each labelled value. Labels are bounded: routes by their templates,
models and pools by what is deployed, workers by those alive. Every gateway reports the same for the pools: take
`max by (pool)` over gateways, not the sum.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from producers.admin.fleet import Fleet, Pool, read_fleet
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.connection.log_throttle import warn_throttled
from producers.connection.storage import Storage, read_storage
from producers.contract import keys
from producers.contract.profile import Profile, sane
from producers.release import release
from producers.store.fleet.cards import profile_field
from producers.store.fleet.scaling import is_fresh
from producers.store.measurements import (
    ALL,
    ENERGY,
    ENGINE_COUNTERS,
    HISTOGRAMS,
    LOST_CAUSES,
    LOST_TIME,
    MICRO,
    PROCESSOR_TIME,
    SOURCE_OUTCOMES,
    START_KINDS,
    START_PHASES,
    START_TIME,
    STARTS,
    TASKS,
    WORKER_STATES,
    WORKER_TIME,
    read_measurements,
    read_source_items,
)
from producers.store.usage.ledger import STATUSES
from producers.store.waiting import Pressure, model_of, queues
from producers.tracing.export import Tracer

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Labels of metrics by model, by pool, and by tier.
MODEL: Final = ("model",)
POOL: Final = ("model", "pool")
TIER: Final = (*POOL, "tier")
#: (name, help, figure of the fleet).
FLEET: Final[tuple[tuple[str, str, Callable[[Fleet], float]], ...]] = (
    ("sweeper_leads", "Whether a sweeper leads.", lambda fleet: fleet.sweeper_leads),
    ("dead_letters", "Messages that no worker could use.", lambda fleet: fleet.dead_letters),
    (
        "webhook_oldest_due_seconds",
        "For how long the oldest delivery, or reply of a source, has been due that nobody took.",
        lambda fleet: fleet.webhooks.oldest_due_s,
    ),
)
#: (name, help, figure of a pool).
POOLS: Final[tuple[tuple[str, str, Callable[[Pool], float]], ...]] = (
    ("delayed", "Tasks to be offered again later.", lambda pool: pool.delayed),
    ("in_flight", "Tasks that workers have taken.", lambda pool: pool.in_flight),
    ("workers", "Workers with a live lease.", lambda pool: len(pool.workers)),
)
#: (name, help, figure of a pool's tier; None: nobody knows).
TIERS: Final[tuple[tuple[str, str, Callable[[Pool, str], float | None]], ...]] = (
    ("queued", "Tasks waiting for a worker.", lambda pool, tier: pool.queued[tier]),
    ("queued_tenants", "Tenants whose tasks wait for their turn.", lambda pool, tier: pool.tenants[tier]),
    (
        "queued_oldest_seconds",
        "Since the task that waits longest was submitted; not for plain Celery tasks.",
        lambda pool, tier: pool.oldest_s.get(tier, None if pool.queued[tier] else 0.0),
    ),
)
#: (name, help, key in the worker's lease, whether it is a counter).
WORKER_FIGURES: Final = (
    ("running", "Sequences that a worker is generating.", "running", False),
    ("waiting", "Sequences that a worker has taken and not yet begun.", "waiting", False),
    ("capacity", "Sequences that a worker can generate at once.", "capacity", False),
    ("kv_blocks_used", "Blocks of a worker's KV cache that sequences hold.", "kv_blocks_used", False),
    ("kv_blocks", "Blocks of a worker's KV cache.", "kv_blocks_total", False),
    ("duty_ratio", "Share of the last 10 s in which a worker's engine had work; of its profile.", "duty", False),
    ("turn_wait_seconds", "Time that a worker has waited for its turn on a shared device.", "turn_wait_s", True),
    ("prompt_tokens", "Prompt tokens that a worker has taken in.", "prompt_tokens", True),
    ("cached_tokens", "Prompt tokens that a worker found in its prefix cache.", "cached_tokens", True),
    ("generated_tokens", "Tokens that a worker has generated.", "generated_tokens", True),
    ("preemptions", "Sequences that a worker has put off for others.", "preemptions", True),
    ("out_of_memory", "Steps for which a worker's device had no memory.", "out_of_memory", True),
    ("not_finite", "Sequences that failed because a worker's model gave NaN or infinity.", "not_finite", True),
    ("drafted_tokens", "Tokens that a worker guessed ahead (speculative decoding).", "drafted", True),
    ("false_takeovers", "Lives of a worker that others ended though it lived.", "false_takeovers", True),
    ("recomputed_tokens", "KV tokens of what it held then, to be computed again.", "recomputed_tokens", True),
    (
        "breaker_open",
        "1 while a worker's breaker holds it back: it fails, or is slow among its peers.",
        "breaker_open",
        False,
    ),
    ("breaker_openings", "Times that a worker's breaker has opened.", "breaker_openings", True),
    ("engine_failures", "Tasks that a worker's engine failed by its own fault.", "engine_failures", True),
    ("slowness_ratio", "Time of a worker's decode steps, divided by its peers' for the same.", "slowness", False),
    ("draft_accepted_tokens", "Of these, those that were right.", "draft_accepted", True),
    ("placed_tasks", "Tasks that a worker took and held a part of: a prefix, or the adapter.", "placed", True),
    ("unplaced_tasks", "Tasks that a worker took and held no part of.", "unplaced", True),
    ("left_fetches", "Fetches in which a worker left a task to another that holds more of it.", "left", True),
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
    ("energy_joules", "Energy that a worker's GPU drew since the driver was loaded.", "energy_joules", True),
    ("sm_clock_hertz", "Clock of the processors of a worker's GPU.", "sm_clock_hertz", False),
    ("memory_clock_hertz", "Clock of the memory of a worker's GPU.", "memory_clock_hertz", False),
    ("ecc_corrected_errors", "Memory errors that were corrected, since the driver was loaded.", "ecc_corrected", True),
    ("ecc_uncorrected_errors", "Memory errors that were not.", "ecc_uncorrected", True),
)
#: (name, help, figure of the profile).
FIGURES: Final = (
    ("knee", "Sequences at once from which on more of them raise a worker's throughput little.", "knee"),
    ("tokens_per_second", "Tokens a second that one worker makes at its knee.", "tokens_per_s"),
)
#: The most characters of a label that a worker names, and the most reasons that it names.
MAX_LABEL, MAX_REASONS = 128, 16
#: Beginnings of the names of a gateway process's own families.
OWN: Final = ("penstock_gateway_", "penstock_build", "process_")
router = APIRouter(tags=["health"])
#: Latency buckets (s), fine in the range that an interactive caller notices.
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
#: The tier label of requests that were refused before their tier was known, or that have none.
UNKNOWN: Final = "unknown"
#: What a stream is: events of a task, an answer that is waited for, a file.
Stream = Literal["events", "answer", "download"]


def family(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]], *, grows: bool = False
) -> Metric:
    """The metric `penstock_<name>`: a gauge, or a counter if it `grows`. `rows`: labels' values, and the value."""
    metric = (CounterMetricFamily if grows else GaugeMetricFamily)(f"penstock_{name}", text, labels=labels)
    for values, value in rows:
        metric.add_metric(values, value)
    return metric


def pool_metrics(fleet: Fleet) -> Iterator[Metric]:
    for name, text, backlog in (
        ("tasks_submitting", "Tasks recorded and not yet confirmed by the broker", fleet.submitting),
        ("tasks_unsettled", "Tasks that are final, and whose message nobody has put down yet", fleet.unsettled),
        ("streams_to_compact", "Streams of settled tasks that are not compacted yet", fleet.to_compact),
    ):
        yield GaugeMetricFamily(f"penstock_{name}", f"{text}.", backlog.count)
        yield GaugeMetricFamily(
            f"penstock_{name}_oldest_seconds", f"{text}: since when the first is.", backlog.oldest_s
        )
    for name, text, fleet_figure in FLEET:
        yield GaugeMetricFamily(f"penstock_{name}", text, fleet_figure(fleet))
    swept = (((action,), count) for action, count in sorted(fleet.swept.items()))
    yield family("swept", "What sweepers did.", ("what",), swept, grows=True)
    rows = (((state,), count) for state, count in fleet.webhooks.rows.items())
    yield family("webhook_rows", "Deliveries of events to webhooks, and replies of sources.", ("state",), rows)
    for name, text, figure in POOLS:
        yield family(name, text, POOL, [((pool.model, pool.name), figure(pool)) for pool in fleet.pools])
    tiers = [((pool.model, pool.name, tier), pool) for pool in fleet.pools for tier in pool.queued]
    for name, text, tier_figure in TIERS:
        values = ((labels, tier_figure(pool, labels[2])) for labels, pool in tiers)
        yield family(name, text, TIER, [(labels, value) for labels, value in values if value is not None])


def waiting_metrics(counts: Mapping[str, Mapping[str, int]], overload: Mapping[str, Pressure]) -> Iterator[Metric]:
    """Families of waiting tasks. `counts`: queue -> kind -> tasks; under the empty name, in all."""
    yield family(
        "waiting_tasks",
        "Tasks that count against the bounds on what waits; `line`: lines of batches, which do not.",
        ("model", "kind"),
        (((model_of(queue), kind), n) for queue, kinds in counts.items() if queue for kind, n in kinds.items()),
    )
    yield family(
        "overload_stage",
        "0: normal; 1: batch and flex are refused; 2: and outputs shortened; 3: and all but priority refused.",
        ("model",),
        (((model_of(queue),), pressure.stage) for queue, pressure in overload.items()),
    )
    yield family(
        "overload_pressure_ratio",
        "What waits, as a share of the bound that is nearest.",
        ("model",),
        (((model_of(queue),), pressure.share) for queue, pressure in overload.items()),
    )


def worker_metrics(fleet: Fleet) -> Iterator[Metric]:
    worker_labels, gpu_labels = (*POOL, "worker"), (*POOL, "worker", "gpu")
    # One for each name, the last begun: the lease of one that was killed stands until it lapses.
    leases = list(
        {
            (pool.model, pool.name, _label(worker["worker"])): worker
            for pool in fleet.pools
            for worker in sorted(pool.workers, key=lambda worker: sane(worker.get("began")) or 0.0)
        }.items()
    )
    reports = [(whose, {**worker, "duty": Profile.of(worker.get("profile")).duty}) for whose, worker in leases]
    yield from _figures("worker", WORKER_FIGURES, worker_labels, reports)
    text = "Time by which a worker began after the store's present, so that its clock is ahead; 0 otherwise."
    ahead = ((whose, max(0.0, (sane(worker.get("began")) or 0.0) - fleet.at)) for whose, worker in leases)
    yield family("worker_clock_ahead_seconds", text, worker_labels, ahead)
    text = "1 for each worker; its label `release` names the worker's release of Penstock."
    releases = (((*whose, _label(worker.get("release", ""))), 1) for whose, worker in leases)
    yield family("worker_info", text, (*worker_labels, "release"), releases)
    text = "0 while a worker drains or says that something is wrong with it."
    ready = ((whose, not (worker.get("draining") or worker.get("unready"))) for whose, worker in leases)
    yield family("worker_ready", text, worker_labels, ready)
    gpus = [
        ((*whose, _label(gpu.get("uuid", ""))), gpu)
        for whose, worker in leases
        if isinstance(gpu := worker.get("gpu"), dict)
    ]
    yield from _figures("worker_gpu", GPU_FIGURES, gpu_labels, gpus)
    text = "1 for each reason that keeps the clocks of a worker's GPU down."
    slowed = (((*which, reason), 1) for which, gpu in gpus for reason in _reasons(gpu.get("slowed_by")))
    yield family("worker_gpu_slowed", text, (*gpu_labels, "reason"), slowed)


def _label(value: Any) -> str:
    """A worker's own word as a label: it may be anything."""
    return str(value)[:MAX_LABEL].encode(errors="replace").decode()


def _reasons(value: Any) -> list[str]:
    """The first reasons that a worker names, each once."""
    return [*dict.fromkeys(map(_label, value[:MAX_REASONS]))] if isinstance(value, list) else []


def _figures(
    prefix: str,
    figures: Sequence[tuple[str, str, str, bool]],
    labels: Sequence[str],
    sources: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
) -> Iterator[Metric]:
    """Yields a family for each figure. `sources`: labels' values and the report with the figures, some of which may be
    missing: another version sent it."""
    for name, text, key, grows in figures:
        values = ((labelled, sane(report.get(key))) for labelled, report in sources)
        rows = [(labelled, value) for labelled, value in values if value is not None]
        yield family(f"{prefix}_{name}", text, labels, rows, grows=grows)


def scaling_metrics(fleet: Fleet) -> Iterator[Metric]:
    yield GaugeMetricFamily("penstock_autoscaler_leads", "Whether an autoscaler leads.", bool(fleet.scaling.leads))
    desired, failures, standbys = [], [], []
    for pool, state in sorted(fleet.scaling.states.items()):
        workers, starts = sane(state.get("wanted")), state.get("starts")
        if workers is None or not is_fresh(state.get("at"), fleet.at):
            continue
        labels = str(state.get("model", pool)), pool
        desired.append((labels, workers))
        failures.append((labels, (sane(starts.get("failures")) if isinstance(starts, dict) else None) or 0))
        actual = state.get("actual")
        if isinstance(actual, dict) and (waiting := sane(actual.get("standbys"))) is not None:
            standbys.append((labels, waiting))
    text = "Workers that the autoscaler wants; absent once its last decision is old."
    yield family("desired_workers", text, POOL, desired)
    yield family("worker_start_failures", "Starts of workers in a row that failed.", POOL, failures)
    text = "Processes that wait to become a worker; all pools of one `penstock up` share them."
    yield family("pool_standbys", text, POOL, standbys)
    yield from _profiles(fleet)


def _profiles(fleet: Fleet) -> Iterator[Metric]:
    profiles = [(_labels(version), profile) for version, profile in sorted(fleet.scaling.profiles.items())]
    for name, text, figure in FIGURES:
        rows = ((labels, getattr(profile, figure)) for labels, profile in profiles)
        yield family(f"pool_{name}", text, POOL, [(labels, value) for labels, value in rows if value is not None])
    phases = (((*labels, phase), s) for labels, profile in profiles for phase, s in profile.cold_start.items())
    text = "Time that the last start of a worker took, by phase."
    yield family("pool_cold_start_seconds", text, (*POOL, "phase"), phases)
    text = "95th percentile of the time to the first token, from the claim; the worst of the version's workers."
    worst = ((_labels(version), seconds) for version, seconds in sorted(_worst_ttft(fleet).items()))
    yield family("pool_ttft_p95_seconds", text, POOL, worst)


def _worst_ttft(fleet: Fleet) -> dict[str, float]:
    """The worst p95 of the first token (s) among the workers of each `model@version`."""
    worst: dict[str, float] = {}
    for pool in fleet.pools:
        for worker in pool.workers:
            seconds = Profile.of(worker.get("profile")).ttft_p95
            if seconds is not None and worker.get("version"):
                version = profile_field(pool.model, str(worker["version"]))
                worst[version] = max(worst.get(version, 0.0), seconds)
    return worst


def _labels(version: str) -> tuple[str, str]:
    return version.rpartition("@")[0], version


def server_metrics(servers: Mapping[str, Storage]) -> Iterator[Metric]:
    """Families of the servers' storage. `servers`: `store` and, where it is another server, `broker`."""
    labels = ("server",)
    text = "Memory that counts against the server's `maxmemory`."
    yield family("storage_used_bytes", text, labels, (((name,), server.used) for name, server in servers.items()))
    text = "The server's `maxmemory`; 0: no bound."
    yield family("storage_limit_bytes", text, labels, (((name,), server.limit) for name, server in servers.items()))
    text = "The used share of `maxmemory`; 0 without a bound. From 0.99 on the server is full."
    yield family("storage_used_ratio", text, labels, (((name,), server.ratio) for name, server in servers.items()))
    text = "Whether the server can write its files; if not, it refuses every write."
    yield family("storage_writable", text, labels, (((name,), not server.fault) for name, server in servers.items()))


def measured_metrics(models: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
    """Counters and histograms of each model (`producers.store.measurements`). Every gateway tells the same: take the
    largest over gateways. Counts of tasks begin at 0 for each model, so that the first one is an increase, too."""
    outcomes = [
        ((model, tier, status), fields.get(f"{TASKS} {tier} {status} n", 0))
        for model, fields in models.items()
        for tier in keys.TIERS
        for status in STATUSES
    ]
    yield family("tasks", "Tasks that ended, by how.", (*MODEL, "tier", "outcome"), outcomes, grows=True)
    for name, text, _ in ENGINE_COUNTERS:
        rows = (((model,), fields.get(f"{name} {ALL} n", 0)) for model, fields in models.items())
        yield family(name, text, MODEL, rows, grows=True)
    times = [
        ((model, state), fields.get(f"{WORKER_TIME} {state} n", 0) / MICRO)
        for model, fields in models.items()
        for state in WORKER_STATES
    ]
    text = "Time of all workers: of steps, in which tasks have a share each; without work; until they took tasks."
    yield family("model_worker_seconds", text, (*MODEL, "state"), times, grows=True)
    text = "Energy that workers' devices drew, by the same states, as far as workers have a meter."
    energy = [
        ((model, state), joules / MICRO)
        for model, fields in models.items()
        for state in WORKER_STATES
        if (joules := fields.get(f"{ENERGY} {state} n")) is not None
    ]
    yield family("model_energy_joules", text, (*MODEL, "state"), energy, grows=True)
    lost = [
        ((model, cause), fields.get(f"{LOST_TIME} {cause} n", 0) / MICRO)
        for model, fields in models.items()
        for cause in LOST_CAUSES
    ]
    text = "Time that tasks lost: put off in an engine, until another worker had them, or computing the same again."
    yield family("model_lost_seconds", text, (*MODEL, "cause"), lost, grows=True)
    starts = [
        ((model, kind), fields.get(f"{STARTS} {kind} n", 0)) for model, fields in models.items() for kind in START_KINDS
    ]
    text = "Starts of workers, by what they began as: a standby, which had imported everything, or a process."
    yield family("model_starts", text, (*MODEL, "start"), starts, grows=True)
    phases = [
        ((model, phase), fields.get(f"{START_TIME} {phase} n", 0) / MICRO)
        for model, fields in models.items()
        for phase in START_PHASES
    ]
    text = "Time of all starts of workers, by phase, until they took tasks."
    yield family("model_start_seconds", text, (*MODEL, "phase"), phases, grows=True)
    text = "Processor time of all workers' processes."
    seconds = [((model,), fields.get(f"{PROCESSOR_TIME} {ALL} n", 0) / MICRO) for model, fields in models.items()]
    yield family("model_processor_seconds", text, MODEL, seconds, grows=True)
    for histogram in HISTOGRAMS:
        labels = (*MODEL, "tier") if histogram.by_tier else MODEL
        metric = HistogramMetricFamily(f"penstock_{histogram.name}", histogram.text, labels=labels)
        for model, fields in models.items():
            for label in keys.TIERS if histogram.by_tier else (ALL,):
                prefix, total, buckets = f"{histogram.name} {label} ", 0, []
                for bound in histogram.buckets:
                    total += fields.get(prefix + bound, 0)
                    buckets.append((bound, float(total)))
                if total:
                    values = (model, label) if histogram.by_tier else (model,)
                    metric.add_metric(values, buckets, fields.get(prefix + "sum", 0) / histogram.scale)
        yield metric


def source_metrics(items: Mapping[tuple[str, str], int]) -> Metric:
    """The counter of what event sources took. `items`: (source, outcome) -> count."""
    text = "Messages, files and times that event sources took, by what became of them."
    sources = dict.fromkeys(source for source, _ in items)
    rows = (
        ((_label(source), outcome), items.get((source, outcome), 0))
        for source in sources
        for outcome in SOURCE_OUTCOMES
    )
    return family("source_items", text, ("source", "outcome"), rows, grows=True)


class Metrics:
    """One gateway's figures. `open_streams` returns the number of open streams of a kind. `process`: the label of its
    own figures, where several processes answer on one socket: each series is one process's, and only grows. `tracer`:
    sends its spans; None if traces are turned off."""

    def __init__(self, open_streams: Callable[[Stream], int], process: str = "", tracer: Tracer | None = None) -> None:
        self._process = process
        self.tracer = tracer
        self.registry = CollectorRegistry()
        self.fleet: Fleet | None = None
        self.clock_skew_s = 0.0
        """This process's clock, less the store's, when the fleet was read."""
        self.waiting: Mapping[str, Mapping[str, int]] = {}
        self.overload: Mapping[str, Pressure] = {}
        """Queue -> kind -> tasks that wait there; queue -> its pressure."""
        self.storage: Mapping[str, Storage] = {}
        """`store` and, where it is another server, `broker` -> how full it is."""
        self.measured: Mapping[str, Mapping[str, int]] = {}
        """Model -> its counters and histograms (`producers.store.measurements`)."""
        self.source_items: Mapping[tuple[str, str], int] = {}
        """(event source, outcome) -> what it took."""
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

    def collect(self) -> Iterator[Metric]:
        """All families. For `exposition`."""
        for metric in self.registry.collect():
            if self._process and metric.name.startswith(OWN):
                metric.samples = [
                    each._replace(labels={**each.labels, "process": self._process}) for each in metric.samples
                ]
            yield metric

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
        yield from measured_metrics(self._metrics.measured)
        yield source_metrics(self._metrics.source_items)
        tracer = self._metrics.tracer
        sent, dropped = (0, 0) if tracer is None else (tracer.exported, tracer.dropped)
        text = "Spans of requests that a collector took, and others: it is away, or slower than they come."
        yield family("gateway_spans", text, ("outcome",), ((("sent",), sent), (("dropped",), dropped)), grows=True)
        if fleet is not None:
            text = "This gateway's clock, less the store's; 0 as far as can be told."
            yield GaugeMetricFamily("penstock_gateway_clock_skew_seconds", text, self._metrics.clock_skew_s)
            yield from pool_metrics(fleet)
            yield from worker_metrics(fleet)
            yield from scaling_metrics(fleet)


#: Samples of the client library that Prometheus' format has as families of their own.
_APART: Final = ("_created", "_gsum", "_gcount")
#: Type in OpenMetrics -> suffix of the family's name, and type, in Prometheus' format.
_TYPES: Final = {"counter": ("_total", "counter"), "info": ("_info", "gauge"), "unknown": ("", "untyped")}


def exposition(collector: Collector) -> bytes:
    """The families as `prometheus_client.generate_latest` writes them, in a third of its time: their names are valid,
    and the text of a label or a number is made once."""
    labels: dict[tuple[str, str], str] = {}
    numbers: dict[float, str] = {}

    def line(sample: Sample) -> str:
        number = numbers.get(sample.value)
        if number is None:
            number = numbers[sample.value] = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
        if not sample.labels:
            return f"{sample.name} {number}\n"
        texts = []
        for pair in sorted(sample.labels.items()):
            text = labels.get(pair)
            if text is None:
                value = pair[1].replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
                text = labels[pair] = f'{pair[0]}="{value}"'
            texts.append(text)
        return f"{sample.name}{{{','.join(texts)}}} {number}\n"

    def head(name: str, text: str, kind: str) -> str:
        text = text.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"

    output: list[str] = []
    for metric in collector.collect():
        suffix, kind = _TYPES.get(metric.type, ("", metric.type))
        output.append(head(metric.name + suffix, metric.documentation, kind))
        apart: dict[str, list[str]] = {}
        for sample in metric.samples:
            suffix = sample.name[len(metric.name) :]
            (apart.setdefault(suffix, []) if suffix in _APART else output).append(line(sample))
        for suffix, lines in sorted(apart.items()):
            output += (head(metric.name + suffix, metric.documentation, "gauge"), *lines)
    return "".join(output).encode()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """The figures in Prometheus' format. It answers also while store or broker is away: see `penstock_up`."""
    gateway = request.app.state.gateway
    figures = gateway.metrics
    try:
        async with asyncio.timeout(SILENT_S):  # Prometheus waits for 10 s
            began = time.time()
            figures.fleet = await read_fleet(gateway.client.store, gateway.client.broker)
            figures.clock_skew_s = _skew(began, time.time(), figures.fleet.at)
            figures.waiting = await queues(gateway.client.store)
            figures.overload = await gateway.admission.overload.all(gateway.client.reserved)
            figures.storage = await read_servers(gateway.client)
            figures.measured = await read_measured(gateway.client.store)
            figures.source_items = await _permitted(read_source_items(gateway.client.store), {})
    except FAILURES:
        figures.fleet, figures.waiting, figures.overload, figures.storage = None, {}, {}, {}
        figures.measured, figures.source_items = {}, {}
    return Response(exposition(figures), media_type=CONTENT_TYPE_LATEST)


def _skew(began: float, ended: float, theirs: float) -> float:
    """This clock, less the store's, which was read between two times of this one: 0 if it lies between them."""
    return began - theirs if theirs < began else min(0.0, ended - theirs)


async def read_measured(store: Redis) -> dict[str, dict[str, int]]:
    """`read_measurements`; empty, and logged, where the server's user may not read them, as an earlier release made it.

    Raises redis.exceptions.RedisError or OSError."""
    return await _permitted(read_measurements(store), {})


async def _permitted(reading: Awaitable[T], default: T) -> T:
    """What is read; `default`, and a line in the log, where the server's user may not read it."""
    try:
        return await reading
    except NoPermissionError as error:
        warn_throttled(log, "Counters and histograms are missing, make the users' file anew: %s", error)
        return default


async def read_servers(client: AsyncClient) -> dict[str, Storage]:
    """The storage of the store, and of a broker that is another server, by their names. The store is asked by
    connections that callers' requests never take. Raises redis.exceptions.RedisError or OSError."""
    servers = {"store": await read_storage(client.reserved)}
    broker = None if client.one_server else await client.broker.storage()
    return servers if broker is None else servers | {"broker": broker}
