"""SQS queues of lists: their URLs, whether they are as the broker needs them, and errors that name them.

The store's hash `keys.QUEUES` has the URLs of queues that an operator made or chose. Others are found by their names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any, Final, Self

from redis import Redis

from producers.broker.sqs import keys
from producers.broker.sqs.address import MIN_VISIBILITY_S, Address, is_celery, split, sqs_name
from producers.connection.aws import AwsError, AwsMissing, aws_errors, client
from producers.connection.script import text
from producers.connection.trouble import Trouble

#: Shortest retention (s): a message is sent again a day before its queue would drop it.
MIN_RETENTION_S: Final = 2 * 24 * 3600
RENEW_BEFORE_S: Final = 24 * 3600
#: Shortest MaximumMessageSize (bytes): Penstock's own messages have about 1,000.
MIN_MESSAGE_BYTES: Final = 4096
#: Time (s) for which SQS's number of messages is cached.
STOCK_S: Final = 30.0
SETUP: Final = "penstock aws setup --broker ... --store ... --model ..."


@dataclass(frozen=True, slots=True)
class Queue:
    """An SQS queue's own settings. Times are seconds."""

    url: str
    fifo: bool
    retention: int
    visibility: int
    """The default visibility timeout; workers use that of the broker's URL."""
    max_message_bytes: int

    @classmethod
    def of(cls, url: str, attributes: Mapping[str, str]) -> Self:
        """`attributes`: all of the queue's, as GetQueueAttributes answers them."""
        return cls(
            url,
            attributes.get("FifoQueue", "false") == "true",
            int(attributes["MessageRetentionPeriod"]),
            int(attributes["VisibilityTimeout"]),
            int(attributes["MaximumMessageSize"]),
        )


class Queues:
    """The SQS queues of one address. Any thread may call.

    `sqs`: a boto3 client; `store`: where `keys.QUEUES` is. Calls raise AwsError, and redis.exceptions.RedisError.
    """

    def __init__(self, sqs: Any, address: Address, store: Redis) -> None:
        self._sqs, self._address, self._store = sqs, address, store
        self._urls: dict[str, str] = {}
        self._queues: dict[str, Queue] = {}
        self._stock: dict[str, tuple[int, float]] = {}

    def url(self, name: str) -> str:
        """The URL of a list's queue, cached once it exists. Raises AwsMissing."""
        url = self._urls.get(name)  # one access: another thread may forget it
        if url is None:
            stored = self._store.hget(keys.QUEUES, name)
            url = self._urls[name] = self._find(name) if stored is None else text(stored)
        return url

    def forget(self, name: str) -> None:
        """Drop its cached URL and settings: it seems to be gone, or was made again."""
        self._urls.pop(name, None)
        self._queues.pop(name, None)

    def check(self, name: str, *, refresh: bool = False) -> Queue:
        """The queue's settings, read once unless `refresh`. Raises AwsError, which names the fault and its repair."""
        queue = None if refresh else self._queues.get(name)
        if queue is None:
            url = self.url(name)
            with self.aws_errors("read the settings of", name, "sqs:GetQueueAttributes"):
                attributes = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            queue = Queue.of(url, attributes)
            if wrong := unfit(queue, is_fifo(self._address, name)):
                raise AwsError(f"{self.called(name)} {wrong}", "UnfitQueue", Trouble.UNUSABLE)
            self._queues[name] = queue
        return queue

    def cached(self, name: str) -> Queue | None:
        """The queue's settings, if they were read. Makes no request."""
        return self._queues.get(name)

    def stock(self, name: str) -> int:
        """SQS's approximate number of messages that wait or are delayed, at most STOCK_S old."""
        count, at = self._stock.get(name, (0, -inf))
        if time.monotonic() - at >= STOCK_S:
            url, attributes = self.url(name), ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed"]
            with self.aws_errors("count the messages of", name, "sqs:GetQueueAttributes"):
                values = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=attributes)["Attributes"]
            count = sum(int(values[attribute]) for attribute in attributes)
            self._stock[name] = (count, time.monotonic())
        return count

    def called(self, name: str) -> str:
        """A list's queue, for messages to people."""
        queue_name = self._urls.get(name, sqs_name(self._address, name)).rpartition("/")[2]
        return f"queue {queue_name} in {self._address.region}"

    @contextmanager
    def aws_errors(self, doing: str, name: str, permission: str) -> Iterator[None]:
        """As `producers.connection.aws.aws_errors`, with the list's queue. Forgets a missing one: it may be made."""
        try:
            with aws_errors(f"{doing} {self.called(name)}", permission):
                yield
        except AwsMissing as error:
            self.forget(name)
            if SETUP in str(error):
                raise
            advice = f"make it with `{SETUP}`, or check region, account and prefix"
            raise AwsMissing(f"{error}: {advice}", error.code, error.trouble) from error

    def _find(self, name: str) -> str:
        account = {"QueueOwnerAWSAccountId": self._address.account} if self._address.account else {}
        with self.aws_errors("find", name, "sqs:GetQueueUrl"):
            url: str = self._sqs.get_queue_url(QueueName=sqs_name(self._address, name), **account)["QueueUrl"]
        return url


class Connection:
    """SQS of an address, and the store that keeps its books. Any thread of one process may use it.

    `store`: closed with it. Raises as `producers.connection.aws.client`.
    """

    def __init__(self, address: Address, store: Redis) -> None:
        self.address: Final = address
        self.store: Final = store
        self.sqs: Final[Any] = client("sqs", address.region, address.endpoint_url)
        self.queues: Final = Queues(self.sqs, address, store)

    def close(self) -> None:
        self.sqs.close()
        self.store.close()


def is_fifo(address: Address, name: str) -> bool:
    """Whether a list's queue has to be a FIFO queue. Those of kombu's senders never are."""
    return address.fifo and not is_celery(split(name)[0])


def unfit(queue: Queue, fifo: bool) -> str:
    """A queue's fault; empty if it has none. `fifo`: whether it has to be a FIFO queue."""
    if queue.fifo != fifo:
        if queue.fifo:
            return "is a FIFO queue: put fifo=1 into the broker's URL, or use another prefix"
        return "is no FIFO queue, which fifo=1 in the broker's URL asks for: drop that, or use another prefix"
    if queue.retention < MIN_RETENTION_S:
        return _short("MessageRetentionPeriod", queue.retention, MIN_RETENTION_S)
    if queue.visibility < MIN_VISIBILITY_S:
        return _short("VisibilityTimeout", queue.visibility, MIN_VISIBILITY_S)
    if queue.max_message_bytes < MIN_MESSAGE_BYTES:
        return _short("MaximumMessageSize", queue.max_message_bytes, MIN_MESSAGE_BYTES)
    return ""


def _short(attribute: str, value: int, minimum: int) -> str:
    return f"has {attribute} {value}; it must be {minimum} or more: set it with `{SETUP}` (sqs:SetQueueAttributes)"
