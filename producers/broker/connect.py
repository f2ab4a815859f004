"""Chooses a broker by its URL's scheme. Nothing connects before the first call.

redis:// rediss:// unix:// and Sentinels    `producers.broker.redis`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import redis
import redis.asyncio

from producers.broker.base import Broker, Consumer, Sender
from producers.broker.memory.consumer import MemoryConsumer
from producers.broker.memory.operator import MemoryBroker, MemorySender
from producers.broker.memory.server import server_of
from producers.broker.redis.consumer import RedisConsumer
from producers.broker.redis.operator import RedisBroker, RedisSender
from producers.connection.connect import SCHEMES, SILENT_S, connect, connect_async, is_redis, shown

MEMORY: Final = "memory://"


def is_known(url: str) -> bool:
    """Whether one of the brokers here speaks to it. kombu may take what is not."""
    return is_redis(url) or _is_memory(url)


def control_url(broker: str, store: str) -> str:
    """The Redis or Valkey server that carries Celery's remote control: the broker if it is one, else the store."""
    return broker if is_redis(broker) else store


def connect_broker(url: str, store_url: str, store: redis.asyncio.Redis | None = None) -> Broker:
    """The asyncio side. `store`: a client of the store, for a broker that is on the same server or keeps its books
    there. Raises ValueError for a URL of another kind."""
    _check(url, store_url)
    if _is_memory(url):
        return MemoryBroker(server_of(url))
    return RedisBroker(store if store is not None and url == store_url else connect_async(url))


def connect_sender(url: str, store_url: str, store: redis.Redis | None = None) -> Sender:
    """A blocking client's side, as `connect_broker`."""
    _check(url, store_url)
    if _is_memory(url):
        return MemorySender(server_of(url))
    return RedisSender(store if store is not None and url == store_url else connect(url))


def connect_consumer(
    url: str, queues: Sequence[str], store_url: str, timeout: float = SILENT_S, home: str | None = None
) -> Consumer:
    """A worker's side. `queues`: those it takes from, its own pool's first; `timeout`: of each answer (s); `home`:
    where what is delayed waits, the first unless given. Raises ValueError for a URL of another kind."""
    _check(url, store_url)
    if _is_memory(url):
        return MemoryConsumer(server_of(url), queues, home)
    return RedisConsumer(url, queues, timeout, home)


def _is_memory(url: str) -> bool:
    return url.startswith(MEMORY)


def _check(url: str, store_url: str) -> None:
    if not is_known(url):
        kinds = ", ".join([*(f"{scheme}://" for scheme in SCHEMES), MEMORY])
        raise ValueError(f"no broker is known for {shown(url)!r}: a broker's URL begins with {kinds}")
