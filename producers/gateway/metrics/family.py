"""Families of figures: a metric's name and help, and a row for each thing that it is told of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

#: Labels of what is told by pool.
POOL: Final = ("model", "pool")


def family(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]], *, grows: bool = False
) -> Metric:
    """The metric `penstock_<name>`: a gauge, or a counter if it `grows`. `rows`: labels' values, and the value."""
    made = (CounterMetricFamily if grows else GaugeMetricFamily)(f"penstock_{name}", text, labels=labels)
    for values, value in rows:
        made.add_metric(values, value)
    return made
