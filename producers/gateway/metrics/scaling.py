"""The autoscaler's decisions, and the measurements of each version's workers. They are known with no worker up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from producers.admin.fleet import Fleet
from producers.contract.profile import Profile, sane
from producers.store.fleet.profiles import field
from producers.store.fleet.scaling import is_fresh

#: (name, help, figure of the profile).
FIGURES: Final = (
    ("knee", "Sequences at once from which on more of them raise a worker's throughput little.", "knee"),
    ("tokens_per_second", "Tokens a second that one worker makes at its knee.", "tokens_per_s"),
)


def described(fleet: Fleet) -> Iterator[Metric]:
    scaling = fleet.scaling
    yield GaugeMetricFamily("penstock_autoscaler_leads", "Whether an autoscaler leads.", bool(scaling.leads))
    desired = GaugeMetricFamily(
        "penstock_desired_workers",
        "Workers that the autoscaler wants; absent once its last decision is old.",
        labels=("model", "pool"),
    )
    failures = GaugeMetricFamily(
        "penstock_worker_start_failures", "Starts of workers in a row that failed.", labels=("model", "pool")
    )
    for pool, state in sorted(scaling.states.items()):
        wanted, starts = sane(state.get("wanted")), state.get("starts")
        if wanted is None or not is_fresh(state.get("at"), fleet.at):
            continue
        labels = str(state.get("model", pool)), pool
        desired.add_metric(labels, wanted)
        failures.add_metric(labels, (sane(starts.get("failures")) if isinstance(starts, dict) else None) or 0)
    yield from (desired, failures)
    yield from _profiles(fleet)


def _profiles(fleet: Fleet) -> Iterator[Metric]:
    profiles = sorted(fleet.scaling.profiles.items())
    for name, text, figure in FIGURES:
        family = GaugeMetricFamily(f"penstock_pool_{name}", text, labels=("model", "pool"))
        for version, profile in profiles:
            if (value := getattr(profile, figure)) is not None:
                family.add_metric((_model(version), version), value)
        yield family
    starts = GaugeMetricFamily(
        "penstock_pool_cold_start_seconds",
        "Time that the last start of a worker took, by phase.",
        labels=("model", "pool", "phase"),
    )
    for version, profile in profiles:
        for phase, seconds in profile.cold_start.items():
            starts.add_metric((_model(version), version, phase), seconds)
    yield starts
    ttft = GaugeMetricFamily(
        "penstock_pool_ttft_p95_seconds",
        "95th percentile of the time to the first token, from the claim; the worst of the version's workers.",
        labels=("model", "pool"),
    )
    for version, seconds in sorted(_worst_ttft(fleet).items()):
        ttft.add_metric((_model(version), version), seconds)
    yield ttft


def _worst_ttft(fleet: Fleet) -> dict[str, float]:
    """The worst p95 of the first token (s) among the workers of each `model@version`."""
    worst: dict[str, float] = {}
    for pool in fleet.pools:
        for worker in pool.workers:
            seconds = Profile.of(worker.get("profile")).ttft_p95
            if seconds is not None and worker.get("version"):
                version = field(pool.model, str(worker["version"]))
                worst[version] = max(worst.get(version, 0.0), seconds)
    return worst


def _model(version: str) -> str:
    return version.rpartition("@")[0]
