"""The figures of queues, of the overload that follows, and of what sweepers and webhooks do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from producers.admin.fleet import Fleet, Pool
from producers.gateway.metrics.family import POOL, family
from producers.store.waiting import Pressure, model_of

TIER: Final = (*POOL, "tier")
#: (name, help, figure of the fleet).
FLEET: Final[tuple[tuple[str, str, Callable[[Fleet], float]], ...]] = (
    ("sweeper_leads", "Whether a sweeper leads.", lambda fleet: fleet.sweeper_leads),
    ("dead_letters", "Messages that no worker could use.", lambda fleet: fleet.dead_letters),
    (
        "webhook_oldest_due_seconds",
        "For how long the oldest delivery, or reply of a source, has been due that nobody took.",
        lambda fleet: fleet.webhooks.oldest_due_s,
    ),
)
#: (name, help, figure of a pool).
POOLS: Final[tuple[tuple[str, str, Callable[[Pool], float]], ...]] = (
    ("delayed", "Tasks to be offered again later.", lambda pool: pool.delayed),
    ("in_flight", "Tasks that workers have taken.", lambda pool: pool.in_flight),
    ("workers", "Workers with a live lease.", lambda pool: len(pool.workers)),
)
#: (name, help, figure of a pool's tier; None: nobody knows).
TIERS: Final[tuple[tuple[str, str, Callable[[Pool, str], float | None]], ...]] = (
    ("queued", "Tasks waiting for a worker.", lambda pool, tier: pool.queued[tier]),
    ("queued_tenants", "Tenants whose tasks wait for their turn.", lambda pool, tier: pool.tenants[tier]),
    (
        "queued_oldest_seconds",
        "Since the task that waits longest was submitted; not for plain Celery tasks.",
        lambda pool, tier: pool.oldest_s.get(tier, None if pool.queued[tier] else 0.0),
    ),
)


def described(fleet: Fleet) -> Iterator[Metric]:
    for name, text, left in (
        ("tasks_submitting", "Tasks recorded and not yet confirmed by the broker", fleet.submitting),
        ("tasks_unsettled", "Tasks that are final, and whose message nobody has put down yet", fleet.unsettled),
        ("streams_to_compact", "Streams of settled tasks that are not compacted yet", fleet.to_compact),
    ):
        yield GaugeMetricFamily(f"penstock_{name}", f"{text}.", left.count)
        yield GaugeMetricFamily(f"penstock_{name}_oldest_seconds", f"{text}: since when the first is.", left.oldest_s)
    for name, text, told in FLEET:
        yield GaugeMetricFamily(f"penstock_{name}", text, told(fleet))
    swept = (((what,), count) for what, count in sorted(fleet.swept.items()))
    yield family("swept", "What sweepers did.", ("what",), swept, grows=True)
    rows = (((state,), count) for state, count in fleet.webhooks.rows.items())
    yield family("webhook_rows", "Deliveries of events to webhooks, and replies of sources.", ("state",), rows)
    for name, text, figure in POOLS:
        yield family(name, text, POOL, [((pool.model, pool.name), figure(pool)) for pool in fleet.pools])
    tiers = [((pool.model, pool.name, tier), pool) for pool in fleet.pools for tier in pool.queued]
    for name, text, of in TIERS:
        found = ((labels, of(pool, labels[2])) for labels, pool in tiers)
        yield family(name, text, TIER, [(labels, value) for labels, value in found if value is not None])


def waiting(counts: Mapping[str, Mapping[str, int]], overload: Mapping[str, Pressure]) -> Iterator[Metric]:
    """Families of waiting tasks. `counts`: queue -> kind -> tasks; under the empty name, in all."""
    yield family(
        "waiting_tasks",
        "Tasks that count against the bounds on what waits; `line`: lines of batches, which do not.",
        ("model", "kind"),
        (((model_of(queue), kind), n) for queue, kinds in counts.items() if queue for kind, n in kinds.items()),
    )
    yield family(
        "overload_stage",
        "0: normal; 1: batch and flex are refused; 2: and outputs shortened; 3: and all but priority refused.",
        ("model",),
        (((model_of(queue),), found.stage) for queue, found in overload.items()),
    )
    yield family(
        "overload_pressure_ratio",
        "What waits, as a share of the bound that is nearest.",
        ("model",),
        (((model_of(queue),), found.share) for queue, found in overload.items()),
    )
