"""Chooses a broker by its URL's scheme. Nothing connects before the first call.

redis:// rediss:// unix:// and Sentinels    `producers.broker.redis`
"""

from __future__ import annotations

from collections.abc import Sequence

from producers.broker.base import Consumer
from producers.broker.redis.consumer import RedisConsumer
from producers.connection.connect import SCHEMES, SILENT_S, is_redis, shown


def connect_consumer(url: str, queues: Sequence[str], timeout: float = SILENT_S) -> Consumer:
    """A worker's side. `queues`: those it takes from, its own pool's first; `timeout`: of each answer (s). Raises
    ValueError for a URL of another kind."""
    _check(url)
    return RedisConsumer(url, queues, timeout)


def _check(url: str) -> None:
    if not is_redis(url):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"no broker is known for {shown(url)!r}: a broker's URL begins with {kinds}")
