"""Chooses a broker by its URL's scheme. Nothing connects before the first call.

redis:// rediss:// unix:// and Sentinels    `producers.broker.redis`
sqs://                                      `producers.broker.sqs`; boto3 is imported when one is used

A broker's modules are imported when it is chosen: a process that starts has no time for those of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Final

import redis
import redis.asyncio

from producers.broker.base import Broker, Consumer, Sender
from producers.broker.sqs.address import SCHEME as SQS
from producers.broker.sqs.address import is_sqs, read
from producers.connection.connect import SCHEMES, SILENT_S, connect, connect_async, is_redis, shown
from producers.contract.message import BodyStore

MEMORY: Final = "memory://"


def is_known(url: str) -> bool:
    """Whether one of the brokers here takes this URL. kombu may take others."""
    return is_redis(url) or is_sqs(url) or _is_memory(url)


def can_place(url: str) -> bool:
    """Whether this broker leaves messages to workers that hold their prefixes (`Capabilities.places`)."""
    return not is_sqs(url)


def control_url(broker: str, store: str) -> str:
    """The Redis or Valkey server that carries Celery's remote control: the broker if it is one, else the store."""
    return broker if is_redis(broker) else store


def connect_broker(url: str, store_url: str, store: redis.asyncio.Redis | None = None) -> Broker:
    """The asyncio side. `store`: a client of the store, for a broker that is on the same server or keeps its books
    there. Raises ValueError for a URL of another kind."""
    _check(url, store_url)
    if _is_memory(url):
        from producers.broker.memory.broker import MemoryBroker
        from producers.broker.memory.server import server_of

        return MemoryBroker(server_of(url))
    if is_sqs(url):
        from producers.broker.sqs.operator import SqsBroker

        return SqsBroker(read(url), store if store is not None else connect_async(store_url), connect(store_url))
    from producers.broker.redis.broker import RedisBroker

    return RedisBroker(store if store is not None and url == store_url else connect_async(url))


def connect_sender(
    url: str, store_url: str, store: redis.Redis | None = None, bodies: BodyStore | None = None
) -> Sender:
    """A blocking client's side, as `connect_broker`. `bodies`: keeps the bodies of messages that are too large."""
    _check(url, store_url)
    if _is_memory(url):
        from producers.broker.memory.broker import MemorySender
        from producers.broker.memory.server import server_of

        return MemorySender(server_of(url))
    if is_sqs(url):
        from producers.broker.sqs.operator import SqsSender

        return SqsSender(read(url), store if store is not None else connect(store_url), bodies)
    from producers.broker.redis.broker import RedisSender

    return RedisSender(store if store is not None and url == store_url else connect(url))


def connect_consumer(
    url: str, queues: Sequence[str], store_url: str, timeout: float = SILENT_S, home: str | None = None
) -> Consumer:
    """A worker's side. `queues`: those it takes from, its own pool's first; `timeout`: of each answer (s); `home`: the
    queue whose delayed messages it serves, by default the first. Raises ValueError for a URL of another kind."""
    _check(url, store_url)
    if _is_memory(url):
        from producers.broker.memory.broker import MemoryConsumer
        from producers.broker.memory.server import server_of

        return MemoryConsumer(server_of(url), queues, home)
    if is_sqs(url):
        from producers.broker.sqs.consumer import SqsConsumer

        return SqsConsumer(read(url), queues, store_url, timeout, home)
    from producers.broker.redis.broker import RedisConsumer

    return RedisConsumer(url, queues, timeout, home)


def check_broker(
    url: str, store_url: str, queues: Sequence[str] | None = None, *, make: bool = False, lease: float = 0.0
) -> None:
    """Check a broker whose queues do not make themselves: SQS. The store must have been checked.

    `queues`: those that have to exist; None: of all versions that workers have announced. `make`: make missing ones,
    where the credentials may. `lease`: a worker's (s). Raises ValueError for a bad URL, AwsNotInstalled, and an OSError
    that says what is wrong.
    """
    _check(url, store_url)
    if not is_sqs(url):
        return
    from producers.broker.sqs.check import check

    address = read(url)
    if address.visibility <= lease:
        raise ValueError(
            f"visibility is {address.visibility} s; it must be longer than the worker's lease ({lease:g} s), or SQS "
            "gives its messages to others before it counts as dead"
        )
    with closing(connect(store_url)) as store:
        check(address, store, queues, make=make)


def _is_memory(url: str) -> bool:
    return url.startswith(MEMORY)


def _check(url: str, store_url: str) -> None:
    if not is_known(url):
        kinds = ", ".join([*(f"{scheme}://" for scheme in (*SCHEMES, SQS)), MEMORY])
        raise ValueError(f"no broker is known for {shown(url)!r}: a broker's URL begins with {kinds}")
    if is_sqs(url) and not is_redis(store_url):
        raise ValueError(f"the broker {url!r} needs a store in Redis or Valkey (--store), which keeps its books")
