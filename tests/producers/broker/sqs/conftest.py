"""A model version's queues on SQS, and both sides of the broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from producers.broker.connect import connect_broker
from producers.broker.sqs.address import read
from producers.broker.sqs.names import lists
from producers.broker.sqs.operator import SqsBroker
from producers.broker.sqs.queues.setup import make_missing
from tests.aws import Aws
from tests.aws_faults import Faults, faulty
from tests.producers.broker.sqs.place import QUEUE, Place, placed


@pytest.fixture
def place(aws: Aws, valkey: Redis, valkey_url: str) -> Iterator[Place]:
    with placed(aws, valkey_url, valkey) as found:
        yield found


@pytest.fixture
def fifo(aws: Aws, valkey: Redis, valkey_url: str) -> Iterator[Place]:
    """Its queues are FIFO queues."""
    with placed(aws, valkey_url, valkey, fifo="1") as found:
        yield found


@pytest.fixture
def seen(aws: Aws) -> Iterator[tuple[Aws, Faults]]:
    """SQS with standard and FIFO queues, and the faults of the proxy before it."""
    for kind in ("0", "1"):
        make_missing(read(aws.broker(fifo=kind)), [name for name, _ in lists(QUEUE)])
    with faulty(aws) as found:
        yield found


@pytest.fixture
def faults(seen: tuple[Aws, Faults]) -> Faults:
    return seen[1]


@pytest.fixture
async def broker(seen: tuple[Aws, Faults], valkey_url: str) -> AsyncIterator[SqsBroker]:
    found = connect_broker(seen[0].broker(), valkey_url)
    assert isinstance(found, SqsBroker)
    yield found
    await found.aclose()
