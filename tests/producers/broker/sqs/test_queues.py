"""SQS queues of lists are found, checked, and named in errors."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from redis import Redis

from producers.broker.memory.message import read as received
from producers.broker.sqs import keys
from producers.broker.sqs.address import lists, read, sqs_name
from producers.broker.sqs.queues import Queues
from producers.connection.aws import AwsError, AwsMissing, client
from producers.connection.trouble import Trouble, trouble
from producers.contract.message import Message
from tests.aws import Aws
from tests.protocol.messages import good

QUEUE = "penstock:queue:m@1"
NAME = lists(QUEUE)[0][0]


def queues(aws: Aws, valkey: Redis, **options: str) -> Queues:
    address = read(aws.broker(**options))
    return Queues(client("sqs", address.region, address.endpoint_url), address, valkey)


def make(aws: Aws, name: str = sqs_name(read("sqs://us-east-1"), NAME), **attributes: str) -> str:
    url: str = aws.client("sqs").create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
    return url


def test_a_queue_is_found_by_its_name_and_where_an_operator_says(aws: Aws, valkey: Redis) -> None:
    known = queues(aws, valkey)
    with pytest.raises(AwsMissing, match=rf"queue {sqs_name(read('sqs://us-east-1'), NAME)} in us-east-1.*aws setup"):
        known.url(NAME)
    url = make(aws)
    assert known.url(NAME) == url, "made meanwhile"
    valkey.hset(keys.QUEUES, NAME, "http://localhost/1/other")
    assert known.url(NAME) == url
    known.forget(NAME)
    assert known.url(NAME) == "http://localhost/1/other"


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"MessageRetentionPeriod": "86400"}, "has MessageRetentionPeriod 86400; it must be 172800 or more"),
        ({"VisibilityTimeout": "5"}, "has VisibilityTimeout 5; it must be 10 or more"),
        ({"MaximumMessageSize": "1024"}, "has MaximumMessageSize 1024; it must be 4096 or more"),
    ],
)
def test_a_queue_that_does_not_fit_is_refused_by_name(
    aws: Aws, valkey: Redis, attributes: dict[str, str], said: str
) -> None:
    make(aws, **attributes)
    with pytest.raises(AwsError, match=rf"^queue pen-m_1_[0-9a-f]+-priority in us-east-1 {re.escape(said)}") as refused:
        queues(aws, valkey).check(NAME)
    assert trouble(refused.value) is Trouble.UNUSABLE


def test_a_fifo_queue_is_one_where_the_url_says_so_alone(aws: Aws, valkey: Redis) -> None:
    fifo = make(aws, sqs_name(read("sqs://us-east-1?fifo=1"), NAME), FifoQueue="true")
    standard = make(aws)
    assert queues(aws, valkey, fifo="1").check(NAME).fifo
    valkey.hset(keys.QUEUES, NAME, fifo)
    with pytest.raises(AwsError, match="is a FIFO queue: put fifo=1 into"):
        queues(aws, valkey).check(NAME)
    valkey.hset(keys.QUEUES, NAME, standard)
    with pytest.raises(AwsError, match="is no FIFO queue, which fifo=1"):
        queues(aws, valkey, fifo="1").check(NAME)


def test_settings_are_read_once_and_again_once_a_queue_seemed_gone(aws: Aws, valkey: Redis) -> None:
    url = make(aws, MessageRetentionPeriod="345600", VisibilityTimeout="60")
    known = queues(aws, valkey)
    found = known.check(NAME)
    assert (found.url, found.retention, found.visibility, found.fifo) == (url, 345600, 60, False)
    sqs = aws.client("sqs")
    sqs.delete_queue(QueueUrl=url)
    assert known.check(NAME) == found
    with pytest.raises(AwsMissing, match="cannot send to queue pen-m_1"), known.aws_errors("send to", NAME, "sqs:Send"):
        sqs.send_message(QueueUrl=url, MessageBody="x")
    with pytest.raises(AwsMissing, match="cannot find queue pen-m_1"):
        known.check(NAME)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqs://KEY:SECRET@", "has a user or a password"),  # as kombu takes it
        ("sqs://KEY:SECRET@us-east-1", "has a user or a password"),
        ("sqs://us-east-1?endpoint_url=http://KEY:SECRET@h:1", "has a user or a password"),
        ("sqs://us-east-1?secret=SECRET", "sqs://us-east-1 has the option secret; known are prefix"),
        ("sqs://", "names no region"),
    ],
)
def test_a_bad_url_is_refused_with_the_reason_and_no_secret_is_repeated(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        read(url)
    assert "SECRET" not in str(refused.value)


def test_an_entry_of_the_index_is_the_same_for_all_copies_of_a_message() -> None:
    message = Message("a:b.c", QUEUE, "priority", 2, 100, "some tenant  x", 7)
    entry = keys.Entry.of(message)
    assert keys.Entry.parse(str(entry)) == entry
    assert keys.member(received(message.envelope().encode())) == str(entry)
    assert entry.message(NAME) == replace(message, at=0)
    assert keys.list_of(message) == NAME
    bare = keys.Entry.of(Message("a", QUEUE, "batch", 1, 5))
    assert keys.Entry.parse(str(bare)) == bare
    assert keys.member(received(bare.message(NAME).envelope().encode())) == str(bare)
    assert keys.list_of(Message("a", "penstock:queue:m", "batch", 1, 5)) == "penstock:queue:m#default"
    assert not keys.member(received(good("a", "other.task", 1, 100, True, "")))
