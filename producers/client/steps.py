"""The client's operations without I/O: generators that yield steps and receive the answers.

    submit(...)  yields  Call, Read, Send, Pause   ->   Client performs them blocking, AsyncClient with awaits

So retries are written and tested once for both clients. A failed step is thrown into the generator as an exception.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from redis import exceptions as redis

from producers.connection.connect import Silent
from producers.connection.script import Call
from producers.connection.trouble import Trouble, trouble
from producers.contract.message import Message
from producers.store.references import Reference

T = TypeVar("T")

#: Exceptions that performing a step may raise.
FAILURES: Final = (redis.RedisError, OSError)


@dataclass(frozen=True, slots=True)
class Read:
    """Commands for the store, sent in one round trip. The answer is the list of their answers.

    `bulk`: they read much, and have a small share of a client's connections.
    """

    commands: tuple[tuple[str | int, ...], ...]
    bulk: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """A message for the broker. Repeating it after a lost reply is harmless: the record decides which copy runs."""

    message: Message


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch a block of a result that was moved to a blob. The answer is that of `Places.block`."""

    reference: Reference
    number: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for `seconds`."""

    seconds: float


Step = Call | Read | Send | Fetch | Pause
Steps = Generator[Step, Any, T]


def drive(steps: Steps[T], perform: Callable[[Step], Any]) -> T:
    """`adrive` with blocking calls."""

    async def at_once(step: Step) -> Any:
        return perform(step)

    try:
        adrive(steps, at_once).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a blocking step does not wait")


async def adrive(steps: Steps[T], perform: Callable[[Step], Awaitable[Any]]) -> T:
    """Perform all steps and return the result."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await perform(step)
            except FAILURES as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def lost(error: Exception) -> bool:
    """Whether the server is unreachable for now: the step may have been done, and may be retried."""
    return trouble(error) is Trouble.AWAY


def backoff(attempt: int) -> float:
    """Seconds before attempt `attempt` + 1: 20 ms doubled up to 1 s, with full jitter."""
    return random.uniform(0.5, 1.0) * min(1.0, 0.02 * 2.0 ** min(attempt, 10))  # noqa: S311 - no secret


def once(step: Step) -> Steps[Any]:
    """Perform a step once, and return its answer."""
    return (yield step)


def persistently(step: Step, patience_s: float) -> Steps[Any]:
    """Perform a repeatable step, and return its answer. It is retried for `patience_s` seconds while the connection
    fails. If the server was silent before, the seconds count from the start of its silence."""
    give_up = time.monotonic() + patience_s
    attempt = 0
    while True:
        try:
            return (yield step)
        except FAILURES as error:
            if not lost(error):
                raise
            if isinstance(error, Silent):
                give_up = min(give_up, error.since + patience_s)
            pause = backoff(attempt)
            if time.monotonic() + pause > give_up:
                raise
        yield Pause(pause)
        attempt += 1
