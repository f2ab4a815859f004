"""Each broker that there is, empty."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from producers.broker.base import Broker, Consumer
from producers.broker.connect import connect_broker, connect_consumer
from producers.broker.sqs.address import is_sqs, lists, read, sqs_name
from producers.broker.values import Rules
from tests.aws import Aws

#: Queues that there are on SQS: of a model version, and one that looks like a pool's.
QUEUES = ("penstock:queue:m@1", "penstock:queue:m@1.x")
QUEUE = QUEUES[1]
INC = "w.1"
RULES = Rules(capacity=(64, 10**6), plain_tokens=512, ageing=10**6, max_redeliveries=5)


@pytest.fixture(params=["redis", "memory", "sqs"])
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request)


def url_of(request: pytest.FixtureRequest) -> str:
    """Of the kind that the fixture's parameter names."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}"
    request.getfixturevalue("valkey")
    if request.param == "sqs":
        found: str = request.getfixturevalue("aws").broker()
        make_queues(request.getfixturevalue("aws"), found, QUEUES)
        return found
    found = request.getfixturevalue("valkey_url")
    return found


def make_queues(aws: Aws, url: str, queues: Sequence[str]) -> None:
    """All lists of these queues, each in one request: without the queues for dead letters, which no broker needs."""
    sqs = aws.client("sqs")
    for name in (name for queue in queues for name, _ in lists(queue)):
        called = sqs_name(read(url), name)
        sqs.create_queue(QueueName=called, Attributes={"FifoQueue": "true"} if called.endswith(".fifo") else {})


@pytest.fixture
def store_url(url: str, request: pytest.FixtureRequest) -> str:
    """Where a broker on SQS keeps its books; others need none."""
    found: str = request.getfixturevalue("valkey_url") if is_sqs(url) else url
    return found


@pytest.fixture
async def broker(url: str, store_url: str) -> AsyncIterator[Broker]:
    found = connect_broker(url, store_url)
    yield found
    await found.aclose()


@pytest.fixture
def consumer(url: str, store_url: str) -> Iterator[Consumer]:
    """It serves QUEUE, and has the lease INC."""
    found = connect_consumer(url, [QUEUE], store_url)
    found.take_lease(INC, "{}", 60.0)
    yield found
    found.close()
