"""Tries, with the credentials of this process, what a process of Penstock does; nothing is changed.

Sending and receiving are not tried: both would change what waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from redis import Redis

from producers.aws.account import Needs
from producers.aws.policies import FILES, OF_TIERS
from producers.broker.sqs.address import sqs_name
from producers.broker.sqs.queues import Queues
from producers.broker.sqs.setup import Finding
from producers.broker.sqs.specs import inbox_name, lists_of
from producers.connection.aws import AwsError, client, told
from producers.connection.trouble import Trouble
from producers.store.blobs.bucket import Bucket

#: A receipt handle, and an object, that nobody has.
NOBODYS: Final = "penstock-probe"


def probe(role: str, needs: Needs, store: Redis) -> list[Finding]:
    """Findings on what a process can and cannot do. Raises ValueError for an unknown one, and AwsError."""
    if role not in OF_TIERS:
        raise ValueError(f"role is {role!r}; it must be one of {', '.join(OF_TIERS)}")
    address = needs.address
    sqs = client("sqs", address.region, address.endpoint_url)
    queues = Queues(sqs, address, store)
    found = []
    for name in lists_of(address, needs.models):
        wrong = dict(_of_queue(role, queues, sqs, name))
        found.append(Finding("queue", sqs_name(address, name), "wrong" if wrong else "keep", wrong, list=name))
    if needs.inbox and role == "sources":
        wrong = dict(_of_inbox(sqs, inbox := inbox_name(address.prefix)))
        found.append(Finding("queue", inbox, "wrong" if wrong else "keep", wrong))
    if needs.bucket is not None and role in FILES:
        found.append(_of_bucket(needs.bucket, address.region))
    return found


def _of_queue(role: str, queues: Queues, sqs: Any, name: str) -> Iterator[tuple[str, str]]:
    """Each thing that is wrong, and why."""
    try:
        url = queues.check(name).url
    except AwsError as error:
        yield "settings", _refused(error)
        return
    for permission, call in _put_down(sqs, url).items():
        if permission in OF_TIERS[role]:
            yield from _tried(permission, call, queues.telling("put down messages of", name, permission))


def _of_inbox(sqs: Any, name: str) -> Iterator[tuple[str, str]]:
    """The same of the queue that the bucket's events come to."""
    try:
        with told(f"find queue {name}", "sqs:GetQueueUrl"):
            url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    except AwsError as error:
        yield "settings", _refused(error)
        return
    for permission, call in _put_down(sqs, url).items():
        yield from _tried(permission, call, told(f"put down messages of queue {name}", permission))


def _put_down(sqs: Any, url: str) -> dict[str, Callable[[], Any]]:
    """Permission -> a call that needs it, for a message that nobody has received."""
    receipt = {"QueueUrl": url, "ReceiptHandle": NOBODYS}
    return {
        "sqs:DeleteMessage": lambda: sqs.delete_message(**receipt),
        "sqs:ChangeMessageVisibility": lambda: sqs.change_message_visibility(**receipt, VisibilityTimeout=0),
    }


def _tried(
    permission: str, call: Callable[[], Any], telling: AbstractContextManager[None]
) -> Iterator[tuple[str, str]]:
    try:
        with telling:
            call()
    except AwsError as error:
        if error.trouble is not None:  # else it only says that nobody has this receipt
            yield permission, _refused(error)


def _of_bucket(bucket: Bucket, region: str) -> Finding:
    s3 = client("s3", bucket.region or region, bucket.endpoint_url)
    wrong = {}
    calls: dict[str, Callable[[], Any]] = {
        "s3:ListBucket": lambda: s3.list_objects_v2(Bucket=bucket.name, Prefix=bucket.key(), MaxKeys=1),
        "s3:GetObject": lambda: s3.get_object(Bucket=bucket.name, Key=bucket.key(NOBODYS)),
    }
    for permission, call in calls.items():
        try:
            with told(f"read {bucket}", permission):
                call()
        except AwsError as error:
            if error.code != "NoSuchKey":
                wrong[permission] = _refused(error)
    return Finding("bucket", bucket.name, "wrong" if wrong else "keep", wrong)


def _refused(error: AwsError) -> str:
    """The error's text. Raises it again where AWS is away: then nothing is known."""
    if error.trouble is Trouble.AWAY:
        raise error
    return str(error)
