"""What goes into a broker's calls and comes out of them, the same for every broker. Times are in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from producers.connection.script import text
from producers.contract import keys

#: Bounds on a tenant's weight; FETCH and the engine have them, too. What lies outside counts as 1.
MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a broker can promise beyond delivering each message at least once."""

    strict_order: bool
    """A tenant's messages of one tier are fetched in the order in which they were sent."""
    front_of_queue: bool
    """What is given back is fetched before what was sent later."""
    tenant_turns: bool
    """Within a tier, the tenant that was served least is next."""
    delay_per_message: bool
    """`Back` may say for how long its message is held back, without a bound."""
    max_message_bytes: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Room for tasks, per tier (index is its rank): what is free, and what lower tiers hold."""

    seqs: tuple[int, int, int, int]
    tokens: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Rules:
    """What a worker's fetches go by."""

    capacity: tuple[int, int]
    """(sequences, tokens) of the whole engine: a task that wants more is counted as that much."""
    plain_tokens: int
    """Tokens that a message is counted as which does not say its size."""
    ageing: float
    """A list whose head has waited unserved for this long counts as one tier higher."""
    max_redeliveries: int
    """After so many deliveries that their worker did not survive, a message is condemned."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """One delivery. `uuid`: its name, as the caller gave it; `rank`: its tier's; `raw`: the message (JSON).

    `condemned`: workers died of it before they could claim its task; claim it by its id before anything decodes it.
    With a reason for which it was `buried`, it is no delivery: the broker has made it a dead letter.
    """

    uuid: str
    queue: str
    rank: int
    raw: bytes
    condemned: bool = False
    buried: str = ""


@dataclass(frozen=True, slots=True)
class Ack:
    """A delivery is done with, for `used` KV tokens. With a `reason`, its message is kept as a dead letter.

    `settled`: the task that its worker has settled, if it has one.
    """

    incarnation: str
    uuid: str
    reason: str = ""
    used: int = 0
    settled: str = ""


@dataclass(frozen=True, slots=True)
class Back:
    """A delivery goes back to the front of its tier, after `delay`."""

    incarnation: str
    uuid: str
    delay: float = 0.0


class PutDown(Enum):
    DONE = "done"
    GONE = "gone"
    """There is no such delivery of that incarnation: said before, or it went back by REAP."""
    UNSETTLED = "unsettled"
    """This server holds the task's record, which is not settled: a failover lost that. The message is still in flight;
    RELEASE the claim, then give it Back."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A worker's incarnation that the broker knows of. `left`: until its lease ends, None where it has ended."""

    incarnation: str
    queue: str
    left: float | None


def by_tier() -> dict[str, int]:
    return dict.fromkeys(keys.TIERS, 0)


@dataclass(slots=True)
class Waiting:
    """A queue at a glance. `taken`: how many messages were ever taken from all queues of the broker."""

    tiers: dict[str, int] = field(default_factory=by_tier)
    taken: int = 0
    served: bool = False
    """Some worker takes from it."""


@dataclass(slots=True)
class Depth:
    """What a queue holds. `waiting`: messages to be fetched, by tier, wherever they lie; `tenants`: of how many tenants
    something waits, as far as that is known. `oldest`: seconds since the task that waits longest was submitted, by
    tier, where that is known."""

    waiting: dict[str, int] = field(default_factory=by_tier)
    tenants: dict[str, int] = field(default_factory=by_tier)
    oldest: dict[str, float] = field(default_factory=dict)
    delayed: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Depths:
    """All queues that were asked for. `workers`: incarnation -> its pool's queue, also of those whose lease ended."""

    queues: dict[str, Depth]
    workers: dict[str, str]
    dead_letters: int


def check_weight(weight: float) -> None:
    """Raises ValueError for one out of bounds."""
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight is {weight:g}; it must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")


def sane_weights(raw: Mapping[Any, Any]) -> dict[str, float]:
    """Tenants' weights, without those that are none."""
    found = {}
    for name, said in raw.items():
        with suppress(ValueError):
            weight = float(text(said))
            if MIN_WEIGHT <= weight <= MAX_WEIGHT:
                found[text(name)] = weight
    return found
