"""A model version's queues on SQS, and both sides of the broker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis

from producers.broker.connect import connect_broker
from producers.broker.sqs.operator import SqsBroker
from tests.aws import Aws
from tests.aws_faults import Faults, faulty
from tests.producers.broker.conftest import make_queues
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
    """SQS with standard queues, and the faults of the proxy before it."""
    make_queues(aws, aws.broker(), [QUEUE])
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
