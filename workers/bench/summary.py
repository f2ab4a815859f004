"""Computes a bench's figures from its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from workers.bench.drive import Client, Sample

SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
#: Share of a core above which the client distorts its own measurement.
BUSY: Final = 0.8


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good request in seconds; None: no limit."""

    ttft: float | None = None
    itl: float | None = None
    """Mean time between the request's tokens."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 100) * len(ordered) // 100) - 1)]


def summary(samples: Sequence[Sample], client: Client, limits: Limits, warm_up: int = 0) -> dict[str, Any]:
    """All figures as JSON data: times in seconds, rates a second. The first `warm_up` samples are left out."""
    counted = [sample for sample in samples if sample.number >= warm_up]
    done = [sample for sample in counted if sample.error is None]
    begin = min((sample.due for sample in counted), default=0.0)
    took = max((sample.ended for sample in counted), default=0.0) - begin
    last_due = max((sample.due for sample in counted), default=0.0)
    made = sum(len(sample.tokens) for sample in done)
    good = [sample for sample in done if _good(sample, limits)]
    tiers = sorted({sample.tier for sample in counted})
    cpu = client.cpu_s / client.wall_s if client.wall_s else 0.0
    late = percentile(client.lags, 0.99) if client.lags else 0.0
    return {
        "v": 1,
        "requests": {
            "sent": len(counted),
            "completed": len(done),
            "failed": len(counted) - len(done),
            "errors": dict(Counter(sample.error for sample in counted if sample.error is not None).most_common()),
        },
        "duration_s": took,
        "offered_per_s": _ratio(len(counted) - 1, last_due - begin),
        "completed_per_s": _ratio(len(done), took),
        "prompt_tokens": sum(sample.prompt_tokens for sample in done),
        "output_tokens": made,
        "output_tokens_per_s": _ratio(made, took),
        "latency_s": _latencies(done),
        "tiers": {tier: _latencies([one for one in done if one.tier == tier]) for tier in tiers},
        "goodput": {
            "limits_s": asdict(limits),
            "good": len(good),
            "share": _ratio(len(good), len(counted)),
            "per_s": _ratio(len(good), took),
        },
        "client": {"cpu": cpu, "loop_late_p99_s": late, "bottleneck": cpu > BUSY},
    }


def _latencies(done: Sequence[Sample]) -> dict[str, dict[str, float] | None]:
    return {
        "ttft": _spread(ttft for sample in done if (ttft := time_to_first(sample)) is not None),
        "itl": _spread(gap for sample in done for gap in gaps(sample)),
        "e2e": _spread(sample.ended - sample.due for sample in done),
        "queue_wait": _spread(sample.queue_wait for sample in done if sample.queue_wait is not None),
    }


def time_to_first(sample: Sample) -> float | None:
    """TTFT: seconds from the request's due time to its first token; None without a token."""
    return sample.tokens[0] - sample.due if sample.tokens else None


def gaps(sample: Sample) -> list[float]:
    """ITL: the times between tokens (s); 0 between tokens that arrived together."""
    return [later - earlier for earlier, later in pairwise(sample.tokens)]


def _good(sample: Sample, limits: Limits) -> bool:
    ttft, between = time_to_first(sample), gaps(sample)
    soon = limits.ttft is None or (ttft is not None and ttft <= limits.ttft)
    smooth = limits.itl is None or not between or sum(between) / len(between) <= limits.itl
    return soon and smooth


def _spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None without values."""
    known = list(values)
    if not known:
        return None
    figures = {name: percentile(known, share) for name, share in SHARES.items()}
    return {"mean": sum(known) / len(known), **figures, "max": max(known)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
