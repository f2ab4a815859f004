"""The autoscaler's decisions, and the measurements of each version's workers. They are known with no worker up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from producers.admin.fleet import Fleet
from producers.contract.profile import Profile, sane
from producers.gateway.metrics.family import POOL, family
from producers.store.fleet.profiles import field
from producers.store.fleet.scaling import is_fresh

#: (name, help, figure of the profile).
FIGURES: Final = (
    ("knee", "Sequences at once from which on more of them raise a worker's throughput little.", "knee"),
    ("tokens_per_second", "Tokens a second that one worker makes at its knee.", "tokens_per_s"),
)


def described(fleet: Fleet) -> Iterator[Metric]:
    yield GaugeMetricFamily("penstock_autoscaler_leads", "Whether an autoscaler leads.", bool(fleet.scaling.leads))
    desired, failures = [], []
    for pool, state in sorted(fleet.scaling.states.items()):
        wanted, starts = sane(state.get("wanted")), state.get("starts")
        if wanted is None or not is_fresh(state.get("at"), fleet.at):
            continue
        labels = str(state.get("model", pool)), pool
        desired.append((labels, wanted))
        failures.append((labels, (sane(starts.get("failures")) if isinstance(starts, dict) else None) or 0))
    text = "Workers that the autoscaler wants; absent once its last decision is old."
    yield family("desired_workers", text, POOL, desired)
    yield family("worker_start_failures", "Starts of workers in a row that failed.", POOL, failures)
    yield from _profiles(fleet)


def _profiles(fleet: Fleet) -> Iterator[Metric]:
    profiles = [(_labels(version), profile) for version, profile in sorted(fleet.scaling.profiles.items())]
    for name, text, figure in FIGURES:
        told = ((labels, getattr(profile, figure)) for labels, profile in profiles)
        yield family(f"pool_{name}", text, POOL, [(labels, value) for labels, value in told if value is not None])
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
                version = field(pool.model, str(worker["version"]))
                worst[version] = max(worst.get(version, 0.0), seconds)
    return worst


def _labels(version: str) -> tuple[str, str]:
    return version.rpartition("@")[0], version
