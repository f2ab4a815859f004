"""Celery's own messages on SQS: where kombu's SQS transport looks for them, and as it reads them."""

from __future__ import annotations

import json

import pytest
from kombu import Connection
from redis import Redis

from producers.broker.sqs.address import read
from producers.broker.sqs.queues.lookup import Queues
from producers.broker.sqs.sending import celery
from producers.connection.aws import client
from producers.contract.message import Message
from tests.aws import Aws


@pytest.mark.parametrize("queue", ["links.of:me@host", "ordered.fifo"])
def test_kombu_reads_what_is_put_into_a_celery_queue(aws: Aws, valkey: Redis, queue: str) -> None:
    address = read(aws.broker())
    sqs = client("sqs", address.region, address.endpoint_url)
    queues = Queues(sqs, address, valkey)
    for name in ("a", "b"):  # the first makes the queue
        celery.put(queues, sqs, address, queue, Message(name, queue, "default", 1, 1).envelope())
    theirs = Connection(
        f"sqs://test:test@{aws.url.removeprefix('http://')}",
        transport_options={"region": address.region, "queue_name_prefix": address.prefix, "is_secure": False},
    )
    with theirs as connection, connection.SimpleQueue(queue) as inbox:
        seen = [inbox.get(timeout=60) for _ in range(2)]
        assert sorted(one.headers["id"] for one in seen) == ["a", "b"]
        assert [json.loads(one.body)[0] for one in seen] == [[], []]
