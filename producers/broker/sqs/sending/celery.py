"""Celery queues that are none of a model version's: links and chords of other programs, and plain Celery's tasks.

Messages are put as kombu's SQS transport puts them (`kombu.transport.SQS.Channel._put`), into a queue of the name that
it would use, so that its consumers find and read them. A queue that does not exist is made, as kombu does.
"""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any, Final

from producers.broker.sqs.address import Address
from producers.broker.sqs.names import sqs_name
from producers.broker.sqs.queues.lookup import Queues
from producers.connection.aws import AwsMissing

#: VisibilityTimeout (s) of a queue that is made, as kombu's.
VISIBILITY_S: Final = 1800


def put(queues: Queues, sqs: Any, address: Address, queue: str, message: str) -> None:
    """Send a message (JSON as kombu writes it) to a Celery queue. Raises AwsError, and redis.exceptions.RedisError."""
    name = f"{queue}#default"
    try:
        url = queues.url(name)
    except AwsMissing:
        url = _made(queues, sqs, sqs_name(address, name), name)
    body = base64.b64encode(message.encode()).decode()
    with queues.telling("send to", name, "sqs:SendMessage"):
        sqs.send_message(QueueUrl=url, MessageBody=body, **_group(url, json.loads(message)["properties"]))


def _made(queues: Queues, sqs: Any, theirs: str, name: str) -> str:
    attributes = {"VisibilityTimeout": str(VISIBILITY_S)}
    if theirs.endswith(".fifo"):
        attributes["FifoQueue"] = "true"
    with queues.telling("make", name, "sqs:CreateQueue"):
        url: str = sqs.create_queue(QueueName=theirs, Attributes=attributes)["QueueUrl"]
    return url


def _group(url: str, properties: dict[str, Any]) -> dict[str, str]:
    """The message's group and its id for deduplication, by the names in which Celery's senders give them."""
    group = {"MessageGroupId": said} if (said := properties.get("MessageGroupId")) else {}
    if not url.endswith(".fifo"):
        return group
    unique = properties.get("MessageDeduplicationId") or str(uuid.uuid4())
    return {"MessageGroupId": "default", **group, "MessageDeduplicationId": unique}
