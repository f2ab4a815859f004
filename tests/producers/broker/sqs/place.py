"""A version's SQS queues on moto, a sender, and a worker's side of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

from producers.broker.base import Sender
from producers.broker.connect import connect_consumer, connect_sender
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, read, sqs_name
from producers.broker.sqs.consumer import SqsConsumer
from producers.broker.values import Credit, Fetched, Rules
from producers.contract.keys import Pool
from producers.contract.message import Message
from tests.aws import Aws
from tests.producers.broker.conftest import INC, RULES, make_queues
from tests.waiting import until as until

POOL: Final = Pool("m", "1", "x")
OWN, QUEUE, CELERY = POOL.queues


@dataclass
class Place:
    """`consumer` has the lease INC."""

    url: str
    store_url: str
    redis: Redis
    sqs: Any
    consumer: SqsConsumer
    sender: Sender
    uuids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    urls: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> Address:
        return read(self.url)

    @property
    def messages(self) -> list[Any]:
        """What the consumer's process has in hand."""
        return self.consumer._receiver.messages

    def queue_url(self, name: str) -> str:
        if name not in self.urls:
            self.urls[name] = self.sqs.get_queue_url(QueueName=sqs_name(self.address, name))["QueueUrl"]
        return self.urls[name]

    def send(self, *ids: str, tier: str = "default", tokens: int = 100, group: str = "", tenant: str = "") -> None:
        for one in ids:
            self.sender.send(Message(one, QUEUE, tier, 1, tokens, tenant=tenant, order_key=group))

    def fetch(self, uuids: Sequence[str], room: int = 64, tokens: int = 10**6, rules: Rules = RULES) -> list[Fetched]:
        fetched = self.consumer.fetch(INC, uuids, Credit((room,) * 4, (tokens,) * 4), rules)
        assert fetched is not None
        return fetched

    def take(self, count: int, room: int = 64, rules: Rules = RULES, tokens: int = 10**6) -> list[Fetched]:
        """So many deliveries, as a worker with so much room takes them: its room shrinks as it goes."""
        found: list[Fetched] = []

        def enough() -> bool:
            left = count - len(found)
            fresh = [f"u{next(self.uuids)}" for _ in range(left)]
            found.extend(self.fetch(fresh, room - len(found), tokens, rules))
            return len(found) >= count

        until(enough)
        return found

    def waiting(self, tier: str = "default") -> int:
        """Messages of a tier that the index has."""
        count: int = self.redis.zcard(keys.waiting(f"{QUEUE}#{tier}"))
        return count

    def flying(self) -> dict[str, Any]:
        """Field -> entry of what is in flight under INC."""
        return {field.decode(): json.loads(raw) for field, raw in self.redis.hgetall(keys.inflight(INC)).items()}

    def counts(self, tier: str = "default", queue: str = QUEUE) -> tuple[int, int]:
        """Messages that SQS has of a tier: visible, hidden."""
        names = "ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"
        url = self.queue_url(f"{queue}#{tier}")
        said = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
        visible, hidden = (int(said[name]) for name in names)
        return visible, hidden


def ids(fetched: Sequence[Fetched]) -> list[str]:
    return [json.loads(one.raw)["headers"]["id"] for one in fetched]


@contextmanager
def placed(aws: Aws, store_url: str, redis: Redis, server: Aws | None = None, **options: str) -> Iterator[Place]:
    """`server`: where the queues are made, if `aws` is a proxy before it."""
    url = aws.broker(**options)
    sqs = (server or aws).client("sqs")
    make_queues(server or aws, url, [QUEUE, *([CELERY] if options.get("celery") else [])])
    consumer = connect_consumer(url, POOL.queues, store_url, home=QUEUE)
    assert isinstance(consumer, SqsConsumer)
    try:
        consumer.take_lease(INC, "{}", 600.0)
        sender = connect_sender(url, store_url)
        yield Place(url, store_url, redis, sqs, consumer, sender)
        sender.close()
    finally:
        consumer.close()
