"""Reads tasks' streams back from the store: whole, as events; or what a worker needs that goes on with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from redis import Redis

from producers.contract import keys
from producers.contract.stream import Event, decode, stream_position

CHUNK = 2000


def read_stream(redis: Redis, task_id: str) -> Iterator[Event]:
    """All events that stand in the stream now, in order. Raises redis errors."""
    for chunk in _chunks(redis, task_id):
        for entry_id, fields in chunk:
            event = decode(stream_position(entry_id), json.loads(fields[b"e"]))
            if event is not None:
                yield event


def read_first(redis: Redis, task_ids: Sequence[str]) -> list[list[Any] | Exception]:
    """The first CHUNK entries of each stream as they come, for `tokens_of`, in one round trip; an error is one stream's
    own. Raises redis errors where the store is away."""
    with redis.pipeline(transaction=False) as pipe:
        for task_id in task_ids:
            pipe.xrange(keys.stream(task_id), "-", "+", count=CHUNK)
        return list(pipe.execute(raise_on_error=False))


def tokens_of(redis: Redis, task_id: str, first: Sequence[Any] | None = None) -> Iterator[tuple[int, int]]:
    """(choice, token id) of each token that stands in the stream now, in order. `first`: what was read already.

    A chunk is parsed as one: to go on with hundreds of streams costs a worker little more than to begin them. Raises
    redis errors.
    """
    for chunk in _chunks(redis, task_id, first):
        for entry in json.loads(b"[" + b",".join(fields[b"e"] for _, fields in chunk) + b"]"):
            if isinstance(entry, list):
                yield entry[0], entry[2]


def _chunks(redis: Redis, task_id: str, first: Sequence[Any] | None = None) -> Iterator[Sequence[Any]]:
    """The stream's entries, CHUNK at a time."""
    chunk: Any = redis.xrange(keys.stream(task_id), "-", "+", count=CHUNK) if first is None else first
    yield chunk
    while len(chunk) == CHUNK:
        chunk = redis.xrange(keys.stream(task_id), b"(" + chunk[-1][0], "+", count=CHUNK)
        yield chunk
