"""A worker's side of SQS, with the queues of one version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from tests.aws import Aws
from tests.producers.broker.sqs.place import Place, placed


@pytest.fixture
def place(aws: Aws, valkey: Redis, valkey_url: str) -> Iterator[Place]:
    with placed(aws, valkey_url, valkey) as found:
        yield found


@pytest.fixture
def fifo(aws: Aws, valkey: Redis, valkey_url: str) -> Iterator[Place]:
    """Its queues are FIFO queues."""
    with placed(aws, valkey_url, valkey, fifo="1") as found:
        yield found
