"""Draws a bench as SVG, without dependencies: distributions of latencies, and the load over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

from workers.bench.drive import Sample
from workers.bench.summary import gaps, time_to_first

#: Colours that colour-blind readers can tell apart (Okabe and Ito, "Color universal design", 2008).
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 340, 64, 16, 44, 56
#: Shortest time (s) on the logarithmic axis; shorter ones are drawn there.
SHORTEST: Final = 1e-3
#: Most points of a line; more than the pixels would show nothing more.
POINTS: Final = 400

Line = tuple[str, list[tuple[float, float]]]


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
    flight = [(at, float(sum(one.due <= at < one.ended for one in samples))) for at in ticks]
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
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>{charts}</svg>\n'
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
        yield f'<text x="{LEFT}" y="{TOP - 22}" font-weight="bold">{escape(self.title)}</text>'
        if not points:
            yield f'<text x="{WIDTH // 2}" y="{HEIGHT // 2}" text-anchor="middle">nothing was measured</text>'
            return
        across, marks = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT, self.logarithmic)
        up, heights = _axis([0.0, *(y for _, y in points)], HEIGHT - BOTTOM, TOP, False)
        for value in marks:
            yield _line(across(value), TOP, across(value), HEIGHT - BOTTOM, "#ddd")
            yield _text(across(value), HEIGHT - BOTTOM + 16, "middle", f"{value:g}")
        for value in heights:
            yield _line(LEFT, up(value), WIDTH - RIGHT, up(value), "#ddd")
            yield _text(LEFT - 6, up(value) + 4, "end", f"{value:g}")
        yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 34, "middle", self.unit)
        for place, (name, line) in reversed(list(enumerate(self.lines))):  # the first is drawn above the others
            colour = COLOURS[place % len(COLOURS)]
            path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
            yield f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{path}"/>'
            if len(self.lines) > 1:
                x = LEFT + 8 + 120 * place
                yield f'<rect x="{x}" y="{TOP - 10}" width="14" height="4" fill="{colour}"/>'
                yield _text(x + 18, TOP - 4, "start", name)


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
