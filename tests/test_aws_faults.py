"""The proxy before moto: each fault comes as boto3 meets AWS's own, and what it leaves is what AWS leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.aws import REGION, Aws
from tests.aws_faults import REFUSALS, Fault, Faults, faulty


@pytest.fixture
def proxy(aws: Aws) -> Iterator[tuple[Aws, Faults]]:
    with faulty(aws) as one:
        yield one


@pytest.fixture
def faults(proxy: tuple[Aws, Faults]) -> Faults:
    return proxy[1]


def once(aws: Aws, service: str) -> Any:
    """A client that does not try again."""
    import boto3

    config = Config(retries={"mode": "standard", "total_max_attempts": 1})
    return boto3.client(service, region_name=REGION, endpoint_url=aws.url, config=config)


@pytest.fixture
def sqs(proxy: tuple[Aws, Faults]) -> Any:
    return once(proxy[0], "sqs")


@pytest.fixture
def queue(sqs: Any) -> str:
    return str(sqs.create_queue(QueueName="q", Attributes={"VisibilityTimeout": "60"})["QueueUrl"])


def send(sqs: Any, queue: str, *bodies: str) -> dict[str, Any]:
    entries = [{"Id": body, "MessageBody": body} for body in bodies]
    return dict(sqs.send_message_batch(QueueUrl=queue, Entries=entries))


def receive(sqs: Any, queue: str) -> list[dict[str, Any]]:
    return list(sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", []))


def bodies(sqs: Any, queue: str) -> list[str]:
    return sorted(message["Body"] for message in receive(sqs, queue))


def delete(sqs: Any, queue: str, *messages: dict[str, Any]) -> dict[str, Any]:
    entries = [{"Id": one["Body"], "ReceiptHandle": one["ReceiptHandle"]} for one in messages]
    return dict(sqs.delete_message_batch(QueueUrl=queue, Entries=entries))


def test_without_faults_it_only_passes_on(sqs: Any, queue: str, faults: Faults, proxy: tuple[Aws, Faults]) -> None:
    assert queue.startswith(proxy[0].url)
    send(sqs, queue, "a", "b")
    messages = receive(sqs, queue)
    assert [one["Id"] for one in delete(sqs, queue, *messages)["Successful"]] == ["a", "b"]
    s3 = once(proxy[0], "s3")
    s3.create_bucket(Bucket="bucket")
    s3.put_object(Bucket="bucket", Key="k/1", Body=b"content")
    assert s3.get_object(Bucket="bucket", Key="k/1")["Body"].read() == b"content"
    assert s3.head_object(Bucket="bucket", Key="k/1")["ContentLength"] == 7
    assert (faults.asked["SendMessageBatch"], faults.asked["PUT"], faults.done.total()) == (1, 2, 0)


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_has_aws_own_code_and_nothing_was_done(kind: str, sqs: Any, queue: str, faults: Faults) -> None:
    faults.put(Fault(kind, "SendMessage", times=1))
    with pytest.raises(ClientError) as refusal:
        send(sqs, queue, "a")
    assert refusal.value.response["Error"]["Code"] == REFUSALS[kind][1]
    assert bodies(sqs, queue) == []
    send(sqs, queue, "a")
    assert bodies(sqs, queue) == ["a"]


@pytest.mark.parametrize(("service", "code"), [("s3", "SlowDown"), ("sns", "RequestThrottled")])
def test_other_services_are_refused_in_their_protocol(
    service: str, code: str, proxy: tuple[Aws, Faults], faults: Faults
) -> None:
    faults.put(Fault("throttle"))
    client = once(proxy[0], service)
    with pytest.raises(ClientError) as refusal:
        client.list_buckets() if service == "s3" else client.list_topics()
    assert refusal.value.response["Error"]["Code"] == code


@pytest.mark.parametrize(("kind", "done"), [("reset", []), ("lost", ["a"])])
def test_a_connection_ends_before_or_after_the_call_was_done(
    kind: str, done: list[str], sqs: Any, queue: str, faults: Faults
) -> None:
    faults.put(Fault(kind, "SendMessage", times=1))
    with pytest.raises(BotoCoreError):
        send(sqs, queue, "a")
    assert bodies(sqs, queue) == done


def test_a_receive_may_be_empty_though_messages_wait(sqs: Any, queue: str, faults: Faults) -> None:
    send(sqs, queue, "a")
    faults.put(Fault("hidden", times=1))
    assert [bodies(sqs, queue), bodies(sqs, queue)] == [[], ["a"]]


def test_a_message_in_flight_is_given_twice_and_either_receipt_deletes_it(sqs: Any, queue: str, faults: Faults) -> None:
    send(sqs, queue, "a")
    faults.put(Fault("twice", times=1))
    (first,), (second,) = receive(sqs, queue), receive(sqs, queue)
    assert (first["MessageId"], first["Body"]) == (second["MessageId"], second["Body"])
    assert first["ReceiptHandle"] != second["ReceiptHandle"]
    delete(sqs, queue, first)
    sqs.change_message_visibility_batch(
        QueueUrl=queue, Entries=[{"Id": "a", "ReceiptHandle": second["ReceiptHandle"], "VisibilityTimeout": 0}]
    )
    assert bodies(sqs, queue) == []


def test_a_stale_receipt_may_delete_nothing(sqs: Any, queue: str, faults: Faults) -> None:
    send(sqs, queue, "a")
    faults.put(Fault("twice", times=1), Fault("stale"))
    (first,), (second,) = receive(sqs, queue), receive(sqs, queue)
    assert delete(sqs, queue, first)["Successful"]
    assert faults.done["stale"] == 1
    sqs.change_message_visibility(QueueUrl=queue, ReceiptHandle=second["ReceiptHandle"], VisibilityTimeout=0)
    (third,) = receive(sqs, queue)
    delete(sqs, queue, third)
    assert faults.done["stale"] == 1


def test_a_deleted_message_comes_once_more(sqs: Any, queue: str, faults: Faults) -> None:
    send(sqs, queue, "a")
    faults.put(Fault("kept", times=1))
    (message,) = receive(sqs, queue)
    assert not delete(sqs, queue, message).get("Failed")
    (again,) = receive(sqs, queue)
    delete(sqs, queue, again)
    sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    assert bodies(sqs, queue) == []


def test_some_entries_of_a_batch_fail(sqs: Any, queue: str, faults: Faults) -> None:
    faults.put(Fault("partial", "SendMessage", times=2))
    said = send(sqs, queue, "a", "b", "c")
    assert [one["Id"] for one in said["Failed"]] == ["a", "b"]
    assert [one["Id"] for one in said["Successful"]] == ["c"]
    assert not any(one["SenderFault"] for one in said["Failed"])
    assert bodies(sqs, queue) == ["c"]


def test_what_is_sent_or_handed_back_is_visible_later(sqs: Any, queue: str, faults: Faults) -> None:
    faults.put(Fault("delayed", "SendMessage", times=1, seconds=600))
    send(sqs, queue, "a", "b")
    (message,) = receive(sqs, queue)
    assert message["Body"] == "b"
    faults.put(Fault("delayed", "ChangeMessageVisibility", seconds=600))
    entry = {"Id": "b", "ReceiptHandle": message["ReceiptHandle"], "VisibilityTimeout": 0}
    sqs.change_message_visibility_batch(QueueUrl=queue, Entries=[entry])
    assert bodies(sqs, queue) == []


def test_the_same_seed_draws_the_same_faults(aws: Aws) -> None:
    drawn = []
    for seed in (3, 3, 4):
        faults = Faults(seed)
        faults.put(Fault("error", chance=0.5))
        drawn.append([faults.draw("error", "SendMessage") is not None for _ in range(64)])
    assert drawn[0] == drawn[1] != drawn[2]


def test_calm_ends_them(sqs: Any, queue: str, faults: Faults) -> None:
    faults.put(Fault("error"))
    faults.calm()
    send(sqs, queue, "a")
    assert bodies(sqs, queue) == ["a"]
