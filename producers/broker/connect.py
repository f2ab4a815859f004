"""Chooses a broker by its URL's scheme. Nothing connects before the first call.

redis:// rediss:// unix:// and Sentinels    `producers.broker.redis`
"""

from __future__ import annotations

from collections.abc import Sequence

import redis
import redis.asyncio

from producers.broker.base import Broker, Consumer, Sender
from producers.broker.redis.consumer import RedisConsumer
from producers.broker.redis.operator import RedisBroker, RedisSender
from producers.connection.connect import SCHEMES, SILENT_S, connect, connect_async, is_redis, shown


def is_known(url: str) -> bool:
    """Whether one of the brokers here speaks to it. kombu may take what is not."""
    return is_redis(url)


def connect_broker(url: str, shared: redis.asyncio.Redis | None = None) -> Broker:
    """The asyncio side. `shared`: the store's client, where that is the same server. Raises ValueError for a URL of
    another kind."""
    _check(url)
    return RedisBroker(connect_async(url) if shared is None else shared)


def connect_sender(url: str, shared: redis.Redis | None = None) -> Sender:
    """A blocking client's side, as `connect_broker`."""
    _check(url)
    return RedisSender(connect(url) if shared is None else shared)


def connect_consumer(url: str, queues: Sequence[str], timeout: float = SILENT_S) -> Consumer:
    """A worker's side. `queues`: those it takes from, its own pool's first; `timeout`: of each answer (s). Raises
    ValueError for a URL of another kind."""
    _check(url)
    return RedisConsumer(url, queues, timeout)


def _check(url: str) -> None:
    if not is_known(url):
        kinds = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"no broker is known for {shown(url)!r}: a broker's URL begins with {kinds}")
