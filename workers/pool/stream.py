"""Reads a task's stream back from the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from redis import Redis

from producers import keys
from producers.events import Event, decode, stream_position

CHUNK = 2000


def read_stream(redis: Redis, task_id: str) -> Iterator[Event]:
    """All events that stand in the stream now, in order. Raises redis errors."""
    start: Any = "-"
    while True:
        chunk: Any = redis.xrange(keys.stream(task_id), start, "+", count=CHUNK)
        for entry_id, fields in chunk:
            event = decode(stream_position(entry_id), json.loads(fields[b"e"]))
            if event is not None:
                yield event
        if len(chunk) < CHUNK:
            return
        start = b"(" + chunk[-1][0]
