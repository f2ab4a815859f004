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
from producers.connection.aws import AwsError, AwsMissing, client, told
from producers.connection.script import text
from producers.connection.trouble import Trouble

#: Shortest retention (s): a message is sent anew a day before its queue would drop it.
MIN_RETENTION_S: Final = 2 * 24 * 3600
RENEW_BEFORE_S: Final = 24 * 3600
#: Shortest MaximumMessageSize (bytes): Penstock's own messages have about 1,000.
MIN_MESSAGE_BYTES: Final = 4096
#: Time (s) for which a number of messages is believed that SQS was asked for.
STOCK_S: Final = 30.0
SETUP: Final = "penstock aws setup --broker ... --store ... --model ..."


@dataclass(frozen=True, slots=True)
class Queue:
    """An SQS queue's own settings. Times are seconds."""

    url: str
    fifo: bool
    retention: int
    visibility: int
    """The visibility timeout of a receiver that asks for none; workers ask for that of the broker's URL."""
    max_message_bytes: int

    @classmethod
    def of(cls, url: str, attributes: Mapping[str, str]) -> Self:
        """`attributes`: all of the queue's, as SQS answers them."""
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
        """A list's queue. It asks once; a queue that is not there yet is looked for again. Raises AwsMissing."""
        found = self._urls.get(name)  # at once: another thread may forget it
        if found is None:
            said = self._store.hget(keys.QUEUES, name)
            found = self._urls[name] = self._find(name) if said is None else text(said)
        return found

    def forget(self, name: str) -> None:
        """Ask again for its URL and settings: it seems to be gone, or was made anew."""
        self._urls.pop(name, None)
        self._queues.pop(name, None)

    def check(self, name: str, *, anew: bool = False) -> Queue:
        """The queue's settings, read once unless `anew`. Raises AwsError, which says what is unfit, and what to do."""
        found = None if anew else self._queues.get(name)
        if found is None:
            url = self.url(name)
            with self.telling("read the settings of", name, "sqs:GetQueueAttributes"):
                said = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
            found = Queue.of(url, said)
            if wrong := unfit(found, is_fifo(self._address, name)):
                raise AwsError(f"{self.called(name)} {wrong}", "UnfitQueue", Trouble.UNUSABLE)
            self._queues[name] = found
        return found

    def known(self, name: str) -> Queue | None:
        """The queue's settings, if they were read. It asks nobody."""
        return self._queues.get(name)

    def stock(self, name: str) -> int:
        """SQS's approximate number of messages that wait or are delayed, at most STOCK_S old."""
        count, at = self._stock.get(name, (0, -inf))
        if time.monotonic() - at >= STOCK_S:
            url, wanted = self.url(name), ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesDelayed"]
            with self.telling("count the messages of", name, "sqs:GetQueueAttributes"):
                said = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=wanted)["Attributes"]
            count = sum(int(said[attribute]) for attribute in wanted)
            self._stock[name] = (count, time.monotonic())
        return count

    def called(self, name: str) -> str:
        """A list's queue, for messages to people."""
        theirs = self._urls.get(name, sqs_name(self._address, name)).rpartition("/")[2]
        return f"queue {theirs} in {self._address.region}"

    @contextmanager
    def telling(self, doing: str, name: str, permission: str) -> Iterator[None]:
        """As `producers.connection.aws.told`, with the list's queue. A missing one is forgotten: it may be made."""
        try:
            with told(f"{doing} {self.called(name)}", permission):
                yield
        except AwsMissing as error:
            self.forget(name)
            if SETUP in str(error):
                raise
            advice = f"make it with `{SETUP}`, or check region, account and prefix"
            raise AwsMissing(f"{error}: {advice}", error.code, error.trouble) from error

    def _find(self, name: str) -> str:
        account = {"QueueOwnerAWSAccountId": self._address.account} if self._address.account else {}
        with self.telling("find", name, "sqs:GetQueueUrl"):
            found: str = self._sqs.get_queue_url(QueueName=sqs_name(self._address, name), **account)["QueueUrl"]
        return found


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
    """Whether a list's queue has to be a FIFO queue: kombu's senders know none."""
    return address.fifo and not is_celery(split(name)[0])


def unfit(queue: Queue, fifo: bool) -> str:
    """The fault of a queue that has to be a FIFO queue, or must not be one; empty if nothing is."""
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


def _short(attribute: str, is_: int, least: int) -> str:
    return f"has {attribute} {is_}; it must be {least} or more: set it with `{SETUP}` (sqs:SetQueueAttributes)"
