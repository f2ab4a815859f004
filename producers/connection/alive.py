"""Scripts that tell whether another worker's process is alive, on any server that has leases (docs/failover.md)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

from redis import Redis
from redis.exceptions import ResponseError

from producers.connection.script import Call, run, script, text
from producers.connection.trouble import trouble

PACKAGE: Final = "producers.connection"


class Seen(IntEnum):
    """An incarnation's state, as a look finds it."""

    LIVES = 0
    """As far as is known."""
    SILENT = 1
    """Its lease says that it listens, and nobody does."""
    GONE = 2
    """It has no lease there."""


def look(looker: str, others: Sequence[str]) -> Call:
    """LOOK: see which of these incarnations are silent. `read_look` reads the answer."""
    return Call(script(PACKAGE, "look"), (), (looker, *others))


def read_look(answer: Sequence[Any], others: Sequence[str]) -> dict[str, Seen] | None:
    """None where the looker itself is not heard: then nothing is known of anybody."""
    return dict(zip(others, map(Seen, answer[1:]), strict=True)) if answer[0] else None


def seen(redis: Redis, looker: str, others: Sequence[str]) -> dict[str, Seen] | None:
    """LOOK, once a cheaper command has found somebody who is not heard. Where all are heard it says all there is."""
    try:
        heard = redis.pubsub_numsub(*(f"penstock:alive:{name}" for name in (looker, *others)))
    except ResponseError as error:
        if trouble(error) is None:
            raise
        return None
    if all(count for _, count in heard):
        return dict.fromkeys(others, Seen.LIVES)
    return read_look(run(redis, look(looker, others)), others)


def end(incarnation: str, looker: str) -> Call:
    """END: end the lease of a silent incarnation. Answers 1 if it has none now, 0 if it keeps it."""
    return Call(script(PACKAGE, "end"), (), (incarnation, looker))


def retract(incarnation: str, returns: str = "") -> Call:
    """RETRACT: take back what was counted when this living incarnation was ended. `read_retract` reads the answer.

    `returns`: the broker's hash of redeliveries by task, if the broker is asked."""
    return Call(script(PACKAGE, "retract"), (returns,) if returns else (), (incarnation,))


def read_retract(answer: Sequence[Any]) -> list[str] | None:
    """Ids of the tasks whose messages were returned; None where nobody ended it."""
    return [text(task_id) for task_id in answer[1:]] if answer[0] else None
