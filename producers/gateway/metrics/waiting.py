"""The figures of what waits, by the store's counts, and of the overload that follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from producers.store.waiting import Pressure, model_of


def described(counts: Mapping[str, Mapping[str, int]], overload: Mapping[str, Pressure]) -> Iterator[Metric]:
    """`counts`: queue -> kind -> tasks; under the empty name, in all."""
    tasks = GaugeMetricFamily(
        "penstock_waiting_tasks",
        "Tasks that count against the bounds on what waits; `line`: lines of batches, which do not.",
        labels=("model", "kind"),
    )
    for queue, kinds in counts.items():
        for kind, number in kinds.items() if queue else ():
            tasks.add_metric((model_of(queue), kind), number)
    stage = GaugeMetricFamily(
        "penstock_overload_stage",
        "0: normal; 1: batch and flex are refused; 2: and outputs shortened; 3: and all but priority refused.",
        labels=("model",),
    )
    share = GaugeMetricFamily(
        "penstock_overload_pressure_ratio", "What waits, as a share of the bound that is nearest.", labels=("model",)
    )
    for queue, found in overload.items():
        stage.add_metric((model_of(queue),), found.stage)
        share.add_metric((model_of(queue),), found.share)
    yield from (tasks, stage, share)
