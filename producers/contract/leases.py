"""The lease protocol between workers, on store and broker alike: JOIN, LOOK, END, RETRACT (docs/how/failover.md).

Taking and renewing a lease differ between the two servers: each has a LEASE script of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from redis import Redis
from redis.exceptions import ResponseError

from producers.connection.script import Call, run, script, text
from producers.connection.trouble import trouble

PACKAGE: Final = "producers.contract"


class Liveness(IntEnum):
    """An incarnation's observed state."""

    LIVES = 0
    """It has a lease, and nothing shows that it is dead."""
    SILENT = 1
    """Its lease says that it is subscribed, and it is not."""
    GONE = 2
    """It has no lease there."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The states that a worker observes on a server that it is subscribed to. `joins`: the server's count of them."""

    joins: int
    others: dict[str, Liveness]


def join(looker: str) -> Call:
    """JOIN: announce that this worker is subscribed now. Answers the join's number, or 0 if it is not subscribed."""
    return Call(script(PACKAGE, "join"), (), (looker,))


def look(looker: str, others: Sequence[str], since: int = 0) -> Call:
    """LOOK: see which of these incarnations are silent. `read_look` reads the answer.

    `since`, here and in what follows: the join since when lease values count, 0: they all do."""
    return Call(script(PACKAGE, "look"), (), (looker, since, *others))


def read_look(answer: Sequence[Any], others: Sequence[str]) -> dict[str, Liveness] | None:
    """None if the looker itself is not subscribed: then no state is known."""
    return dict(zip(others, map(Liveness, answer[1:]), strict=True)) if answer[0] else None


def observe(redis: Redis, looker: str, others: Sequence[str], since: int = 0) -> Observation | None:
    """LOOK, if cheaper commands find a worker that is not subscribed; else their answer is enough.

    None if the looker itself is not subscribed."""
    try:
        with redis.pipeline(transaction=False) as pipe:
            pipe.pubsub_numsub(*(f"penstock:alive:{name}" for name in (looker, *others)))
            pipe.get("penstock:joins")
            listeners, joins = pipe.execute()
    except ResponseError as error:
        if trouble(error) is None:
            raise
        return None
    if all(count for _, count in listeners):
        return Observation(int(joins or 0), dict.fromkeys(others, Liveness.LIVES))
    states = read_look(run(redis, look(looker, others, since)), others)
    return None if states is None else Observation(int(joins or 0), states)


def end(incarnation: str, looker: str, since: int = 0) -> Call:
    """END: end the lease of a silent incarnation. Answers 1 if it has none now, 0 if it keeps it."""
    return Call(script(PACKAGE, "end"), (), (incarnation, looker, since))


def retract(incarnation: str, returns: str = "") -> Call:
    """RETRACT: take back what was counted when this living incarnation was ended. `read_retract` reads the answer.

    `returns`: the broker's hash of redeliveries by task, if the broker is asked."""
    return Call(script(PACKAGE, "retract"), (returns,) if returns else (), (incarnation,))


def read_retract(answer: Sequence[Any]) -> list[str] | None:
    """Ids of the tasks whose messages were returned; None if the incarnation was not ended."""
    return [text(task_id) for task_id in answer[1:]] if answer[0] else None
