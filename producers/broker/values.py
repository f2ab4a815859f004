"""Arguments and results of a broker's calls, the same for every broker. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from producers.connection.script import text
from producers.contract import keys

#: Bounds of a tenant's weight; FETCH and the engine have the same. A weight outside counts as 1.
MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
#: Time (ms) for which a message is left to the worker that holds its prefix.
LEFT_MS: Final = 50


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A broker's guarantees beyond at-least-once delivery."""

    front_of_queue: bool
    """A message that was given back is fetched before later ones."""
    max_message_bytes: int
    pool_queues: bool = True
    """Pools have queues of their own, so that what was begun goes back to a worker of its pool."""
    prunes: bool = True
    """Waiting messages can be removed by others than those who receive them."""
    order_per_key: bool = False
    """Messages of one queue, tier and `order_key` are handed out one after another, in the order of sending."""
    places: bool = False
    """A message is left for a moment to the worker that holds the longest part of its prefix."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Capacity for tasks of each tier (index: its rank): free capacity plus what lower tiers hold."""

    seqs: tuple[int, int, int, int]
    tokens: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a worker's fetches."""

    capacity: tuple[int, int]
    """(sequences, tokens) of the whole engine; a larger task counts as this much."""
    plain_tokens: int
    """Assumed tokens of a message without a size."""
    ageing: float
    """A list whose head has waited unserved for this long counts as one tier higher."""
    max_redeliveries: int
    """Number of deliveries whose worker died, after which a message is condemned."""
    left_ms: int = LEFT_MS
    """Time for which a message is left to the worker that holds its prefix."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One delivery. `uuid`: chosen by the caller. `rank`: its tier's rank. `raw`: the message (JSON).

    `returned`: workers that had it died, and it counts; `condemned`: too many of them, before they claimed its task;
    claim it by its id, without decoding it. `buried`: a reason, if the broker made the message a dead letter instead.
    """

    uuid: str
    queue: str
    rank: int
    raw: bytes
    returned: bool = False
    condemned: bool = False
    buried: str = ""


@dataclass(frozen=True, slots=True)
class Ack:
    """Acknowledges a delivery that used `used` KV tokens. With a `reason`, its message becomes a dead letter.

    `settled`: id of the task that its worker has settled, or empty.
    """

    incarnation: str
    uuid: str
    reason: str = ""
    used: int = 0
    settled: str = ""


@dataclass(frozen=True, slots=True)
class Back:
    """Returns a delivery to the front of its tier after `delay` seconds; in the queue `to`, if that is not its own."""

    incarnation: str
    uuid: str
    delay: float = 0.0
    to: str = ""


class PutDown(Enum):
    DONE = "done"
    GONE = "gone"
    """The incarnation has no such delivery: it was put down before, or returned by REAP."""
    UNSETTLED = "unsettled"
    """The task's record on this server is not settled, since a failover lost that. The message is still in flight:
    RELEASE the claim, then give it Back."""


@dataclass(frozen=True, slots=True)
class ListedWorker:
    """A worker's incarnation that the broker lists. `remaining_s`: seconds of its lease; None if that has ended."""

    incarnation: str
    queue: str
    remaining_s: float | None


def by_tier() -> dict[str, int]:
    return dict.fromkeys(keys.TIERS, 0)


@dataclass(slots=True)
class Waiting:
    """A queue's waiting messages. `delivered_tokens`: KV tokens of all messages ever fetched."""

    tiers: dict[str, int] = field(default_factory=by_tier)
    delivered_tokens: int = 0
    served: bool = False
    """Whether a worker serves the queue."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A waiting message's position in its tier of its queue."""

    ahead: int = 0
    """Messages of the tier that go before it."""
    exact: bool = False
    """Whether `ahead` is counted; if several tenants wait, it is estimated."""
    due_s: float | None = None
    """Seconds until a message that was given back with a delay waits in its list; None for others."""
    tokens: int | None = None
    """KV tokens that those `ahead` may need: of many, by samples; None: unknown."""
    left_to: str = ""
    """The incarnation that it is left to, since that holds a longer part of its prefix; empty: none."""


@dataclass(frozen=True, slots=True)
class TenantCounts:
    """The records' counts of a waiting message's tenant, and of others."""

    tenants: Mapping[str, int]
    """Tenant -> waiting tasks, in all queues."""
    before: float | None = None
    """The share of its tenant's tasks that came before it, 0 to 1; None: unknown."""
    tokens: float | None = None
    """KV tokens that those may need, on average; None: unknown."""


NO_COUNTS: Final = TenantCounts({})


@dataclass(slots=True)
class Depth:
    """A queue's contents. `waiting`: tier -> messages to fetch. `tenants`: tier -> known tenants with waiting messages.

    `oldest`: tier -> seconds since the longest waiting task was submitted, where known.
    """

    waiting: dict[str, int] = field(default_factory=by_tier)
    tenants: dict[str, int] = field(default_factory=by_tier)
    oldest: dict[str, float] = field(default_factory=dict)
    delayed: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Depths:
    """The requested queues. `workers`: incarnation -> its pool's queue, also those whose lease has ended."""

    queues: dict[str, Depth]
    workers: dict[str, str]
    dead_letters: int


def check_weight(weight: float) -> None:
    """Raise ValueError for a weight out of bounds."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight is {weight:g}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")


def sane_weights(raw: Mapping[Any, Any]) -> dict[str, float]:
    """Tenant -> weight, without invalid ones."""
    weights = {}
    for name, value in raw.items():
        with suppress(ValueError):
            weight = float(text(value))
            if MIN_WEIGHT <= weight <= MAX_WEIGHT:
                weights[text(name)] = weight
    return weights
