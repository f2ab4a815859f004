"""The figures of workers' leases. A value that is no number from 0 on is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import Metric

from producers.admin.fleet import Fleet
from producers.contract.profile import sane
from producers.gateway.metrics.family import POOL, family

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


def described(fleet: Fleet) -> Iterator[Metric]:
    worker_labels, gpu_labels = (*POOL, "worker"), (*POOL, "worker", "gpu")
    # One for each name, the last begun: the lease of one that was killed stands until it lapses.
    leases = list(
        {
            (pool.model, pool.name, str(worker["worker"])): worker
            for pool in fleet.pools
            for worker in sorted(pool.workers, key=lambda worker: sane(worker.get("began")) or 0.0)
        }.items()
    )
    yield from _figures("worker", WORKER_FIGURES, worker_labels, leases)
    text = "1 for each worker; its label `release` names the worker's release of Penstock."
    releases = (((*whose, str(worker.get("release", ""))), 1) for whose, worker in leases)
    yield family("worker_info", text, (*worker_labels, "release"), releases)
    text = "0 while a worker drains or says that something is wrong with it."
    ready = ((whose, not (worker.get("draining") or worker.get("unready"))) for whose, worker in leases)
    yield family("worker_ready", text, worker_labels, ready)
    gpus = [
        ((*whose, str(gpu.get("uuid", ""))), gpu)
        for whose, worker in leases
        if isinstance(gpu := worker.get("gpu"), dict)
    ]
    yield from _figures("worker_gpu", GPU_FIGURES, gpu_labels, gpus)
    text = "1 for each reason that keeps the clocks of a worker's GPU down."
    slowed = (((*which, str(reason)), 1) for which, gpu in gpus for reason in gpu.get("slowed_by", ()))
    yield family("worker_gpu_slowed", text, (*gpu_labels, "reason"), slowed)


def _figures(
    what: str,
    figures: Sequence[tuple[str, str, str, bool]],
    labels: Sequence[str],
    found: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
) -> Iterator[Metric]:
    """A family for each figure. `found`: labels' values, and what was told with them; another version may lack some."""
    for name, text, key, grows in figures:
        told = ((whose, sane(said.get(key))) for whose, said in found)
        rows = [(whose, value) for whose, value in told if value is not None]
        yield family(f"{what}_{name}", text, labels, rows, grows=grows)
