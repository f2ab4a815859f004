"""Draws outcomes over time as SVG: waiting tasks, workers, priority's TTFT, and cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from workers.autoscaler.simulate.compare import time_to_first
from workers.autoscaler.simulate.simulation import SAMPLE, Outcome
from workers.bench.plot import POINTS, Panel, drawn

Points = list[tuple[float, float]]


def plot(outcomes: Mapping[str, Outcome], title: str, price: float) -> str:
    """The SVG's text; at most four outcomes can be told apart."""
    panels = [
        _panel("waiting tasks", "priority and default", outcomes, lambda out: _line(out, "hurried")),
        _panel("workers", "with those that start or drain", outcomes, lambda out: _line(out, "up")),
        _panel("p95 of the TTFT of priority", "s", outcomes, _ttft),
        _panel("cost", "so far", outcomes, lambda out: _line(out, "worker_s", price / 3600)),
    ]
    return drawn(panels, 2, title)


def _panel(title: str, note: str, outcomes: Mapping[str, Outcome], points: Callable[[Outcome], Points]) -> Panel:
    return Panel(f"{title} ({note})", "hours", [(name, points(out)) for name, out in outcomes.items()])


def _line(out: Outcome, name: str, factor: float = 1.0) -> Points:
    return _thin([(sample.at / 3600, getattr(sample, name) * factor) for sample in out.samples])


def _ttft(out: Outcome) -> Points:
    """p95 of the tasks that arrived in each ten minutes."""
    length, slots = 10 * SAMPLE, defaultdict(list)
    for task in out.tasks:
        if task.rank == 0 and task.first is not None:
            slots[int(task.at / length)].append(time_to_first(task))
    return [
        (slot * length / 3600, sorted(times)[int(0.95 * (len(times) - 1))]) for slot, times in sorted(slots.items())
    ]


def _thin(points: Points) -> Points:
    """The largest of each few points, as many as can be seen."""
    each = -(-len(points) // POINTS)
    return [max(points[k : k + each], key=lambda point: point[1]) for k in range(0, len(points), each)]
