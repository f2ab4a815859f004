"""What senders put into SQS and its index, in how many requests, and what becomes of faults."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import kombu
import pytest
from redis import Redis

from producers.broker.base import Sender
from producers.broker.connect import connect_broker, connect_sender
from producers.broker.sqs import keys
from producers.broker.sqs.address import read, sqs_name
from producers.broker.sqs.operator import SqsBroker
from producers.broker.sqs.queues import Connection
from producers.broker.sqs.sending import put_celery
from producers.connection.aws import AwsError, AwsMissing
from producers.connection.trouble import Trouble, trouble
from producers.contract.message import Message, MessageTooLarge, redeem
from producers.store.files import MessageBlobs
from tests.aws import Aws
from tests.aws_faults import Fault, Faults
from tests.producers.broker.conftest import make_queues
from tests.producers.broker.sqs.place import QUEUE
from tests.waiting import PATIENCE_S

DEFAULT, BATCH = f"{QUEUE}#default", f"{QUEUE}#batch"


def message(name: str, tier: str = "default", **more: Any) -> Message:
    return Message(name, QUEUE, tier, 1, 100, **more)


def url_of(aws: Aws, name: str = DEFAULT, **options: str) -> str:
    """The SQS queue of a list. `options`: those of the broker's URL."""
    found: str = aws.client("sqs").get_queue_url(QueueName=sqs_name(read(aws.broker(**options)), name))["QueueUrl"]
    return found


def received(aws: Aws, name: str = DEFAULT, **options: str) -> list[dict[str, Any]]:
    """All messages of a list, which stay hidden for a while."""
    sqs, found = aws.client("sqs"), []
    asked = {"MaxNumberOfMessages": 10, "WaitTimeSeconds": 0, "MessageSystemAttributeNames": ["All"]}
    while some := sqs.receive_message(QueueUrl=url_of(aws, name, **options), VisibilityTimeout=600, **asked).get(
        "Messages"
    ):
        found += some
    return found


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [json.loads(one["Body"])["headers"]["id"] for one in messages]


@contextmanager
def sender(aws: Aws, valkey_url: str, **options: str) -> Iterator[Sender]:
    found = connect_sender(aws.broker(**options), valkey_url)
    try:
        yield found
    finally:
        found.close()


def test_a_message_is_in_the_index_and_in_its_queue(seen: tuple[Aws, Faults], valkey: Redis, valkey_url: str) -> None:
    with sender(seen[0], valkey_url) as broker:
        for one in (message("a", tenant="Zoë's"), message("a", tenant="Zoë's"), message("b", "batch", at=7)):
            broker.send(one)
    assert ids(received(seen[0])) == ["a", "a"]
    assert ids(received(seen[0], BATCH)) == ["b"]
    assert valkey.zrange(keys.waiting(DEFAULT), 0, -1) == ["a 1 100 Zoë's".encode()], "once for all copies"
    assert valkey.zrange(keys.waiting(BATCH), 0, -1, withscores=True) == [(b"b 1 100 ", 7.0)]
    assert valkey.hgetall(keys.tenants(DEFAULT)) == {"Zoë's".encode(): b"1"}


def test_tenants_are_groups_of_a_fair_queue(seen: tuple[Aws, Faults], valkey_url: str) -> None:
    with sender(seen[0], valkey_url) as broker:
        for name, tenant in (("a", "t1"), ("b", "with space"), ("c", "x" * 200), ("d", "")):
            broker.send(message(name, tenant=tenant))
    groups = {one["Attributes"].get("MessageGroupId") for one in received(seen[0])}
    assert len(groups) == 4
    assert {"t1", None} < groups


def test_a_fifo_queue_orders_by_key_within_a_tenant_and_takes_what_is_sent_again(
    seen: tuple[Aws, Faults], valkey_url: str
) -> None:
    make_queues(seen[0], seen[0].broker(fifo="1"), [QUEUE])
    with sender(seen[0], valkey_url, fifo="1") as broker:
        assert broker.capabilities.order_per_key
        for one in (
            message("a", order_key="k"),
            message("b", order_key="k"),
            message("c", order_key="k", tenant="t"),
            message("d"),
            message("a", order_key="k"),
        ):
            broker.send(one)
    sqs = seen[0].client("sqs")
    url = url_of(seen[0], fifo="1")
    wanted = {"QueueUrl": url, "MaxNumberOfMessages": 10, "WaitTimeSeconds": 0, "MessageSystemAttributeNames": ["All"]}
    found = []
    while some := sqs.receive_message(**wanted).get("Messages"):
        found += some
        for one in some:
            sqs.delete_message(QueueUrl=url, ReceiptHandle=one["ReceiptHandle"])
    group = {one["Attributes"]["MessageGroupId"] for one in found}
    of_k = [name for name, one in zip(ids(found), found, strict=True) if one["Attributes"]["MessageGroupId"] == "k"]
    assert of_k == ["a", "b", "a"], "again, within five minutes"
    assert len(group) == 3
    assert "d" in group


async def test_what_is_sent_at_the_same_time_shares_requests(
    broker: SqsBroker, seen: tuple[Aws, Faults], faults: Faults
) -> None:
    await asyncio.gather(*(broker.send(message(f"t{k}")) for k in range(35)))
    assert faults.asked["SendMessageBatch"] == 4
    assert len(received(seen[0])) == 35
    assert (await broker.waiting(QUEUE)).tiers["default"] == 35


async def test_many_are_sent_though_some_fail_at_first(
    broker: SqsBroker, seen: tuple[Aws, Faults], faults: Faults
) -> None:
    faults.put(Fault("partial", "SendMessage", times=3), Fault("throttle", "SendMessage", times=1))
    await broker.send_many([message(f"t{k}") for k in range(25)])
    assert faults.done["partial"] == 3
    assert sorted(ids(received(seen[0]))) == sorted(f"t{k}" for k in range(25)), "none twice"


async def test_each_of_a_batch_has_an_outcome_of_its_own(
    broker: SqsBroker, seen: tuple[Aws, Faults], faults: Faults
) -> None:
    faults.put(Fault("partial", "SendMessage", times=1))
    outcomes = await asyncio.gather(*(broker.send(message(name)) for name in "abc"), return_exceptions=True)
    failed = [(name, error) for name, error in zip("abc", outcomes, strict=True) if error is not None]
    ((name, error),) = failed
    assert isinstance(error, AwsError)
    assert trouble(error) is Trouble.AWAY, "to be tried again"
    assert sorted([name, *ids(received(seen[0]))]) == ["a", "b", "c"]


async def test_who_leaves_before_its_turn_sends_nothing(
    broker: SqsBroker, seen: tuple[Aws, Faults], faults: Faults
) -> None:
    gone = asyncio.create_task(broker.send(message("gone")))
    await asyncio.sleep(0)
    gone.cancel()
    await broker.send(message("stays"))
    assert ids(received(seen[0])) == ["stays"]


async def test_refusals_say_queue_region_permission_and_what_to_do(
    broker: SqsBroker, aws: Aws, faults: Faults, valkey_url: str
) -> None:
    faults.put(Fault("denied", "SendMessage", times=1))
    named = r"cannot send to queue pen-m_1_[0-9a-f]{8}-default in us-east-1"
    with pytest.raises(AwsError, match=rf"{named}: AccessDenied.*needs sqs:SendMessage"):
        await broker.send(message("a"))
    elsewhere = connect_broker(aws.broker("other-"), valkey_url)
    with pytest.raises(AwsMissing, match=r"queue other-m_1_.*penstock aws setup"):
        await elsewhere.send(message("a"))
    await elsewhere.aclose()


def test_celerys_own_message_goes_to_its_tier_of_a_version(seen: tuple[Aws, Faults], valkey_url: str) -> None:
    with sender(seen[0], valkey_url) as broker:
        broker.put(QUEUE, "batch", message("a").envelope())
    assert ids(received(seen[0], BATCH)) == ["a"]


@pytest.mark.parametrize("connect", [connect_broker, connect_sender])
def test_its_store_has_to_be_a_redis(connect: Any, aws: Aws) -> None:
    with pytest.raises(ValueError, match="needs a store in Redis or Valkey"):
        connect(aws.broker(), aws.broker())


@pytest.mark.parametrize("queue", [QUEUE, "penstock:queue:tiny"])
def test_the_body_of_a_message_that_is_too_large_is_kept_aside(
    aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path, queue: str
) -> None:
    name, address = f"{queue}#default", read(aws.broker())
    made = aws.client("sqs").create_queue(QueueName=sqs_name(address, name), Attributes={"MaximumMessageSize": "8192"})
    large = json.dumps({**json.loads(message("a").envelope()), "body": "x" * 8000})
    bodies = MessageBlobs(valkey, str(tmp_path))
    for kept in (None, bodies):
        with closing(connect_sender(aws.broker(), valkey_url, bodies=kept)) as broker:
            if kept is None:
                with pytest.raises(MessageTooLarge, match="its queue takes"):
                    broker.put(queue, "default", large)
            else:
                broker.put(queue, "default", large)
    (sent,) = aws.client("sqs").receive_message(QueueUrl=made["QueueUrl"])["Messages"]
    body = sent["Body"] if sent["Body"].startswith("{") else base64.b64decode(sent["Body"]).decode()
    assert len(sent["Body"]) <= 8192
    assert json.loads(redeem(body, bodies)) == json.loads(large)


def test_a_large_message_for_another_program_is_left_to_sqs(
    aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    large = json.dumps({**json.loads(message("a").envelope()), "body": "x" * 8000})
    with closing(connect_sender(aws.broker(), valkey_url, bodies=MessageBlobs(valkey, str(tmp_path)))) as broker:
        broker.put("theirs", "default", large)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("queue", ["links.of:me@host", "ordered.fifo"])
def test_kombu_reads_what_is_put_into_a_celery_queue(aws: Aws, valkey: Redis, queue: str) -> None:
    """Celery's own messages are where kombu's SQS transport looks for them, and as it reads them."""
    address = read(aws.broker())
    to = Connection(address, valkey)
    for name in ("a", "b"):  # the first makes the queue
        put_celery(to, queue, Message(name, queue, "default", 1, 1).envelope())
    theirs = kombu.Connection(
        f"sqs://test:test@{aws.url.removeprefix('http://')}",
        transport_options={"region": address.region, "queue_name_prefix": address.prefix, "is_secure": False},
    )
    with theirs as connection, connection.SimpleQueue(queue) as inbox:
        messages = [inbox.get(timeout=PATIENCE_S) for _ in range(2)]
        assert sorted(message.headers["id"] for message in messages) == ["a", "b"]
        assert [json.loads(message.body)[0] for message in messages] == [[], []]
