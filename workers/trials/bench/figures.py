"""Computes a bench's figures from its samples, and draws them as SVG, without dependencies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final
from xml.sax.saxutils import escape

from workers.trials.bench.load import Client, Sample

SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
#: Share of a core above which the client distorts its own measurement.
BUSY: Final = 0.8
#: Colours that colour-blind readers can tell apart (Okabe and Ito, "Color universal design", 2008).
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
WIDTH, HEIGHT, MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 560, 340, 64, 16, 44, 56
#: Shortest time (s) on the logarithmic axis; shorter ones are drawn there.
SHORTEST: Final = 1e-3
#: Most points of a line; more than the pixels would show nothing more.
POINTS: Final = 400
Line = tuple[str, list[tuple[float, float]]]


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
    elapsed = max((sample.ended for sample in counted), default=0.0) - begin
    last_due = max((sample.due for sample in counted), default=0.0)
    tokens = sum(len(sample.tokens) for sample in done)
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
        "duration_s": elapsed,
        "offered_per_s": _ratio(len(counted) - 1, last_due - begin),
        "completed_per_s": _ratio(len(done), elapsed),
        "prompt_tokens": sum(sample.prompt_tokens for sample in done),
        "output_tokens": tokens,
        "output_tokens_per_s": _ratio(tokens, elapsed),
        "latency_s": _latencies(done),
        "tiers": {tier: _latencies([sample for sample in done if sample.tier == tier]) for tier in tiers},
        "goodput": {
            "limits_s": asdict(limits),
            "good": len(good),
            "share": _ratio(len(good), len(counted)),
            "per_s": _ratio(len(good), elapsed),
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
    numbers = list(values)
    if not numbers:
        return None
    figures = {name: percentile(numbers, share) for name, share in SHARES.items()}
    return {"mean": sum(numbers) / len(numbers), **figures, "max": max(numbers)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def plot(samples: Sequence[Sample], title: str) -> str:
    """The SVG's text. Failed samples count in the load, not in the latencies."""
    done = [sample for sample in samples if sample.error is None]
    latencies = {
        "TTFT": [ttft for sample in done if (ttft := time_to_first(sample)) is not None],
        "between tokens": [gap for sample in done for gap in gaps(sample)],
        "end to end": [sample.ended - sample.due for sample in done],
        "queue wait": [sample.queue_wait for sample in done if sample.queue_wait is not None],
    }
    end = max((sample.ended for sample in samples), default=1.0)
    step = max(end / 60, 1e-3)
    ticks = [step * k for k in range(math.ceil(end / step) + 1)]
    flight = [(at, float(sum(sample.due <= at < sample.ended for sample in samples))) for at in ticks]
    tokens = [0.0] * len(ticks)
    for sample in done:
        for at in sample.tokens:
            tokens[min(int(at / step), len(tokens) - 1)] += 1 / step
    panels = [
        Panel("latency: share of all that took no longer", "seconds", _distributions(latencies), logarithmic=True),
        Panel("requests under way", "seconds since the start", [("requests", flight)]),
        Panel("output tokens a second", "seconds since the start", [("tokens", list(zip(ticks, tokens, strict=True)))]),
    ]
    return drawn(panels, len(panels), title)


def drawn(panels: Sequence[Panel], columns: int, title: str) -> str:
    """The SVG's text: panels in rows of so many, below a title."""
    width, height = WIDTH * columns, HEIGHT * -(-len(panels) // columns) + 28
    charts = "".join(
        f'<g transform="translate({WIDTH * (k % columns)},{28 + HEIGHT * (k // columns)})">{"".join(panel.draw())}</g>'
        for k, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        f'<text x="{MARGIN_LEFT}" y="24" font-size="15">{escape(title)}</text>{charts}</svg>\n'
    )


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: lines over a shared horizontal axis; the vertical axis begins at 0."""

    title: str
    unit: str
    lines: list[Line]
    logarithmic: bool = False

    def draw(self) -> Iterator[str]:
        """The chart's SVG elements."""
        points = [point for _, line in self.lines for point in line]
        yield f'<text x="{MARGIN_LEFT}" y="{MARGIN_TOP - 22}" font-weight="bold">{escape(self.title)}</text>'
        if not points:
            yield f'<text x="{WIDTH // 2}" y="{HEIGHT // 2}" text-anchor="middle">nothing was measured</text>'
            return
        across, marks = _axis([x for x, _ in points], MARGIN_LEFT, WIDTH - MARGIN_RIGHT, self.logarithmic)
        up, heights = _axis([0.0, *(y for _, y in points)], HEIGHT - MARGIN_BOTTOM, MARGIN_TOP, False)
        for value in marks:
            yield _line(across(value), MARGIN_TOP, across(value), HEIGHT - MARGIN_BOTTOM, "#ddd")
            yield _text(across(value), HEIGHT - MARGIN_BOTTOM + 16, "middle", f"{value:g}")
        for value in heights:
            yield _line(MARGIN_LEFT, up(value), WIDTH - MARGIN_RIGHT, up(value), "#ddd")
            yield _text(MARGIN_LEFT - 6, up(value) + 4, "end", f"{value:g}")
        yield _text((MARGIN_LEFT + WIDTH - MARGIN_RIGHT) / 2, HEIGHT - MARGIN_BOTTOM + 34, "middle", self.unit)
        for index, (name, line) in reversed(list(enumerate(self.lines))):  # the first is drawn above the others
            colour = COLOURS[index % len(COLOURS)]
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>'
            if len(self.lines) > 1:
                x = MARGIN_LEFT + 8 + 120 * index
                yield f'<rect x="{x}" y="{MARGIN_TOP - 10}" width="14" height="4" fill="{colour}"/>'
                yield _text(x + 18, MARGIN_TOP - 4, "start", name)


def _distributions(latencies: dict[str, list[float]]) -> list[Line]:
    """Each latency's distribution as a line of (value, share of values that are at most that)."""
    lines = []
    for name, values in latencies.items():
        # A logarithmic axis has no 0, the ITL of tokens that arrived together.
        ordered = sorted(max(value, SHORTEST) for value in values)
        picked = sorted({round(k * (len(ordered) - 1) / (POINTS - 1)) for k in range(POINTS)}) if ordered else []
        if picked:
            lines.append((name, [(ordered[k], (k + 1) / len(ordered)) for k in picked]))
    return lines


def _axis(
    values: Sequence[float], start: float, end: float, logarithmic: bool
) -> tuple[Callable[[float], float], list[float]]:
    """A function from values to pixels, and the round values to mark, which enclose all values."""
    low, high = min(values), max(values)
    if logarithmic:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        marks = [10.0**power for power in range(first, last + 1)]
        return lambda v: start + (end - start) * (math.log10(v) - first) / (last - first), marks
    size = max(high - low, 1e-9)
    step = 10.0 ** math.floor(math.log10(size / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if size / (step * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    marks = [step * k for k in range(first, max(last, first + 1) + 1)]
    return lambda v: start + (end - start) * (v - marks[0]) / (marks[-1] - marks[0]), marks


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
