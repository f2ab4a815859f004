"""SQS is checked before a process starts: what is missing or denied is said, with queue, region and what to do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator

import pytest
from redis import Redis

from producers.broker.connect import check_broker
from producers.broker.sqs.address import lists, read, sqs_name
from producers.connection.aws import AwsError, AwsMissing, AwsNotInstalled
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys
from tests.aws import Aws
from tests.aws_faults import Fault, Faults, faulty

POOL = keys.Pool("m", "1", "x")
QUEUE = POOL.version_queue
NAMES = [sqs_name(read("sqs://us-east-1"), name) for name, _ in lists(QUEUE)]


@pytest.fixture
def faults(aws: Aws) -> Iterator[tuple[Aws, Faults]]:
    with faulty(aws) as found:
        yield found


def announce(valkey: Redis) -> None:
    about = {"model": POOL.model, "version": POOL.version, "fingerprint": POOL.fingerprint}
    valkey.hset(keys.POOLS, POOL.queue, json.dumps(about))


def make(aws: Aws, *names: str) -> None:
    for name in names:
        aws.client("sqs").create_queue(QueueName=name)


def test_a_missing_queue_is_named_with_its_region_and_the_command_that_makes_it(
    aws: Aws, valkey: Redis, valkey_url: str
) -> None:
    check_broker(aws.broker(), valkey_url)  # no model is known yet
    announce(valkey)
    make(aws, *NAMES[:3])
    with pytest.raises(AwsMissing, match=rf"queue {NAMES[3]} in us-east-1.*penstock aws setup --broker"):
        check_broker(aws.broker(), valkey_url)
    make(aws, NAMES[3])
    check_broker(aws.broker(), valkey_url)
    with pytest.raises(AwsMissing, match="queue pen-penstock_queue_m in us-east-1"):
        check_broker(aws.broker(celery="1"), valkey_url, [QUEUE, keys.model_queue("m")])
    check_broker(aws.broker(), valkey_url, [QUEUE, keys.model_queue("m")])


def test_a_worker_makes_what_is_missing_where_it_may(
    faults: tuple[Aws, Faults], aws: Aws, valkey: Redis, valkey_url: str
) -> None:
    proxied, coming = faults
    coming.put(Fault("denied", "CreateQueue", times=1))
    with pytest.raises(AwsMissing, match=rf"{NAMES[0]} in us-east-1.*aws setup.*may not make it.*sqs:CreateQueue"):
        check_broker(proxied.broker(), valkey_url, [QUEUE], make=True)
    check_broker(proxied.broker(), valkey_url, [QUEUE], make=True)
    made = aws.client("sqs").list_queues(QueueNamePrefix="pen-m_1")["QueueUrls"]
    assert sorted(url.rpartition("/")[2] for url in made) == sorted(NAMES)


@pytest.mark.parametrize(
    ("kind", "action", "says", "found"),
    [
        ("denied", "GetQueueUrl", "AccessDenied: .*it needs sqs:GetQueueUrl", Trouble.DENIED),
        ("denied", "GetQueueAttributes", "AccessDenied: .*it needs sqs:GetQueueAttributes", Trouble.DENIED),
        ("expired", "", "the credentials have expired", Trouble.DENIED),
        ("skewed", "", "this machine's clock is wrong", Trouble.DENIED),
        ("throttle", "", "RequestThrottled", Trouble.AWAY),
        ("error", "", "InternalError", Trouble.AWAY),
    ],
)
def test_a_refusal_says_which_queue_and_permission(
    faults: tuple[Aws, Faults], valkey_url: str, aws: Aws, kind: str, action: str, says: str, found: Trouble
) -> None:
    make(aws, *NAMES)
    proxied, coming = faults
    coming.put(Fault(kind, action))
    with pytest.raises(AwsError, match=rf"queue {re.escape(NAMES[0])} in us-east-1: .*{says}") as refused:
        check_broker(proxied.broker(), valkey_url, [QUEUE])
    assert trouble(refused.value) is found


def test_without_boto3_its_extra_is_named(aws: Aws, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(AwsNotInstalled, match=r"pip install 'penstock\[aws\]'"):
        check_broker(aws.broker(), valkey_url)


def test_credentials_for_other_queues_alone_are_good_ones(faults: tuple[Aws, Faults], valkey_url: str) -> None:
    """While no model is announced, the look is at a queue that nobody needs."""
    proxied, coming = faults
    coming.put(Fault("denied", times=1))
    check_broker(proxied.broker(), valkey_url)
    coming.put(Fault("expired", times=1))
    with pytest.raises(AwsError, match="the credentials have expired"):
        check_broker(proxied.broker(), valkey_url)
