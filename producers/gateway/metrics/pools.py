"""The figures of queues, and of what sweepers and webhooks do."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from producers.admin.fleet import Fleet


def described(fleet: Fleet) -> Iterator[Metric]:
    for name, text, left in (
        ("tasks_submitting", "Tasks recorded and not yet confirmed by the broker", fleet.submitting),
        ("tasks_unsettled", "Tasks that are final, and whose message nobody has put down yet", fleet.unsettled),
        ("streams_to_compact", "Streams of settled tasks that are not compacted yet", fleet.to_compact),
    ):
        yield GaugeMetricFamily(f"penstock_{name}", f"{text}.", left.count)
        yield GaugeMetricFamily(f"penstock_{name}_oldest_seconds", f"{text}: since when the first is.", left.oldest_s)
    yield GaugeMetricFamily("penstock_sweeper_leads", "Whether a sweeper leads.", fleet.sweeper_leads)
    swept = CounterMetricFamily("penstock_swept", "What sweepers did.", labels=("what",))
    for what, count in sorted(fleet.swept.items()):
        swept.add_metric((what,), count)
    yield swept
    yield GaugeMetricFamily("penstock_dead_letters", "Messages that no worker could use.", fleet.dead_letters)
    rows = GaugeMetricFamily("penstock_webhook_rows", "Deliveries of events to webhooks.", labels=("state",))
    for state, count in fleet.webhooks.rows.items():
        rows.add_metric((state,), count)
    yield rows
    yield GaugeMetricFamily(
        "penstock_webhook_oldest_due_seconds",
        "For how long the oldest delivery has been due that nobody took.",
        fleet.webhooks.oldest_due_s,
    )
    queued = GaugeMetricFamily("penstock_queued", "Tasks waiting for a worker.", labels=("model", "pool", "tier"))
    tenants = GaugeMetricFamily(
        "penstock_queued_tenants", "Tenants whose tasks wait for their turn.", labels=("model", "pool", "tier")
    )
    oldest = GaugeMetricFamily(
        "penstock_queued_oldest_seconds",
        "Since the task that waits longest was submitted; not for plain Celery tasks.",
        labels=("model", "pool", "tier"),
    )
    delayed = GaugeMetricFamily("penstock_delayed", "Tasks to be offered again later.", labels=("model", "pool"))
    in_flight = GaugeMetricFamily("penstock_in_flight", "Tasks that workers have taken.", labels=("model", "pool"))
    workers = GaugeMetricFamily("penstock_workers", "Workers with a live lease.", labels=("model", "pool"))
    for pool in fleet.pools:
        for tier, waiting in pool.queued.items():
            queued.add_metric((pool.model, pool.name, tier), waiting)
            tenants.add_metric((pool.model, pool.name, tier), pool.tenants[tier])
            if not waiting or tier in pool.oldest_s:
                oldest.add_metric((pool.model, pool.name, tier), pool.oldest_s.get(tier, 0.0))
        delayed.add_metric((pool.model, pool.name), pool.delayed)
        in_flight.add_metric((pool.model, pool.name), pool.in_flight)
        workers.add_metric((pool.model, pool.name), len(pool.workers))
    yield from (queued, tenants, oldest, delayed, in_flight, workers)
