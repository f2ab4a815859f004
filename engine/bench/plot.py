"""Draws a line chart as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 860, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 200, 40, 50
#: Okabe and Ito's colours, which also colour-blind people can distinguish.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y), both above 0."""


def chart(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """Draw a chart with two logarithmic axes. Raises ValueError if there is no point, or one at 0 or below."""
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError("a chart needs a point")
    if min(min(point) for point in points) <= 0:
        raise ValueError("a logarithmic chart has no place for 0 or less")
    columns, rows = _axis([x for x, _ in points]), _axis([y for _, y in points])
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x_of(x: float) -> float:
        return _LEFT + wide * _share(x, columns)

    def y_of(y: float) -> float:
        return _TOP + high * (1 - _share(y, rows))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 22, title, size=15),
        _text(_LEFT + wide / 2, _HEIGHT - 12, across, anchor="middle"),
        _text(12, _TOP - 10, up),
    ]
    for tick in columns:
        parts.append(_rule(x_of(tick), _TOP, x_of(tick), _TOP + high))
        parts.append(_text(x_of(tick), _TOP + high + 18, f"{tick:g}", anchor="middle"))
    for tick in rows:
        parts.append(_rule(_LEFT, y_of(tick), _LEFT + wide, y_of(tick)))
        parts.append(_text(_LEFT - 8, y_of(tick) + 4, f"{tick:g}", anchor="end"))
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"/>' for x, y in line.points]
        parts.append(_text(_LEFT + wide + 16, _TOP + 14 + 18 * i, line.name, colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis(values: Sequence[float]) -> list[float]:
    """The ticks of an axis: 1, 2 and 5 times powers of ten, from below the smallest value to above the largest."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    low = max(tick for tick in every if tick <= min(values) * (1 + 1e-9))
    high = min((tick for tick in every if tick >= max(values)), default=every[-1])
    chosen = [tick for tick in every if low <= tick <= high]
    return chosen if len(chosen) > 1 else [low, 2 * low]


def _share(value: float, axis: Sequence[float]) -> float:
    return math.log(value / axis[0]) / math.log(axis[-1] / axis[0])


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
