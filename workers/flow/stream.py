"""Reads tasks' streams back from the store: as events, or as the tokens from which a worker continues."""

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
    """Reads the first CHUNK raw entries of each stream, for `tokens_of`, in one round trip. A stream's own error stands
    in its place. Raises redis errors if the store is away."""
    with redis.pipeline(transaction=False) as pipe:
        for task_id in task_ids:
            pipe.xrange(keys.stream(task_id), "-", "+", count=CHUNK)
        return list(pipe.execute(raise_on_error=False))


def tokens_of(redis: Redis, task_id: str, first: Sequence[Any] | None = None) -> Iterator[tuple[int, int]]:
    """Yields (choice, token id) of each token in the stream now, in order. `first`: entries that were read already.

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
