"""SQS of an address, and the store that keeps its books: what every blocking side of the broker works with."""

from __future__ import annotations

from typing import Any, Final

from redis import Redis

from producers.broker.sqs.address import Address
from producers.broker.sqs.queues.lookup import Queues
from producers.connection.aws import client


class Connection:
    """Any thread of one process may use it. `store`: closed with it. Raises as `producers.connection.aws.client`."""

    def __init__(self, address: Address, store: Redis) -> None:
        self.address: Final = address
        self.store: Final = store
        self.sqs: Final[Any] = client("sqs", address.region, address.endpoint_url)
        self.queues: Final = Queues(self.sqs, address, store)

    def close(self) -> None:
        self.sqs.close()
        self.store.close()
