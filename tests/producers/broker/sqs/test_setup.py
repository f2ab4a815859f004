"""SQS queues are made, corrected and checked; what cannot be changed is refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from redis import Redis

from producers.broker.sqs.address import Address, lists, read, sqs_name
from producers.broker.sqs.queues import Queues
from producers.broker.sqs.setup import PAUSES_S, Setup, make_missing, own_account, patiently
from producers.broker.sqs.specs import MAX_RECEIVES, Encryption, dead_letters_name, lists_of, queue_specs
from producers.connection.aws import AwsError, AwsMissing, client
from producers.connection.trouble import Trouble
from tests.aws import ACCOUNT, Aws
from tests.exhaustive import few

MODELS = [("tiny", "4f1c00000000")]
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a"


def provide(address: Address, tags: dict[str, str] | None = None, **options: Any) -> dict[str, Any]:
    """SQS's name of each queue -> what was found."""
    found = Setup(address, **options).provide(queue_specs(address, lists_of(address, MODELS), tags or {}))
    return {one.name: one for one in found}


def attributes(aws: Aws, name: str) -> dict[str, str]:
    sqs = aws.client("sqs")
    url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    found: dict[str, str] = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
    return found


@pytest.mark.parametrize("options", few([{}, {"fifo": "1", "celery": "1", "visibility": "90"}], {}))
def test_all_queues_of_a_model_are_made_and_a_second_time_nothing_changes(
    aws: Aws, valkey: Redis, options: dict[str, str]
) -> None:
    address = read(aws.broker(**options))
    planned = provide(address, {"team": "ml"}, apply=False)
    assert {one.action for one in planned.values()} == {"create"}
    assert "QueueUrls" not in aws.client("sqs").list_queues()
    assert provide(address, {"team": "ml"}).keys() == planned.keys()
    assert {one.action for one in provide(address, {"team": "ml"}, apply=False).values()} == {"keep"}
    names = lists_of(address, MODELS)
    assert len(names) == (5 if options else 4)
    for name in names:
        queue = Queues(client("sqs", address.region, address.endpoint_url), address, valkey).check(name)
        found = attributes(aws, sqs_name(address, name))
        assert (queue.retention, queue.visibility) == (14 * 24 * 3600, address.visibility)
        assert (found["ReceiveMessageWaitTimeSeconds"], found["SqsManagedSseEnabled"]) == ("20", "true")
        redrive = json.loads(found["RedrivePolicy"])
        assert redrive["maxReceiveCount"] == MAX_RECEIVES
        assert redrive["deadLetterTargetArn"].endswith(dead_letters_name("pen-", queue.fifo))
        tags = aws.client("sqs").list_queue_tags(QueueUrl=queue.url)["Tags"]
        queue_name, _, tier = name.partition("#")
        assert tags == {"team": "ml", "penstock:queue": queue_name, "penstock:tier": tier}


def test_what_someone_changed_is_corrected_and_nothing_else(aws: Aws) -> None:
    address = read(aws.broker())
    name = next(one for one in provide(address) if one.endswith("-flex"))
    sqs = aws.client("sqs")
    url = sqs.get_queue_url(QueueName=name)["QueueUrl"]
    sqs.set_queue_attributes(
        QueueUrl=url, Attributes={"MessageRetentionPeriod": "60", "DelaySeconds": "5", "MaximumMessageSize": "8192"}
    )
    sqs.untag_queue(QueueUrl=url, TagKeys=["penstock:tier"])
    found = provide(address)
    assert found[name].action == "change"
    assert found[name].details == {
        "MessageRetentionPeriod": "60 -> 1209600",
        "DelaySeconds": "5 -> 0",
        "tag penstock:tier": "unset -> flex",
    }
    assert [one.name for one in found.values() if one.action != "keep"] == [name]
    assert attributes(aws, name)["MaximumMessageSize"] == "8192"
    assert {one.action for one in provide(address).values()} == {"keep"}


def test_a_key_is_kept_unless_another_is_asked_for(aws: Aws) -> None:
    address = read(aws.broker())
    provide(address, encryption=Encryption(KEY))
    assert {one.action for one in provide(address).values()} == {"keep"}
    name = dead_letters_name("pen-", False)
    assert attributes(aws, name)["KmsMasterKeyId"] == KEY
    changed = provide(address, encryption=Encryption(aws_keys=True))
    assert changed[name].details["KmsMasterKeyId"] == f"{KEY} -> unset"
    assert not attributes(aws, name).get("KmsMasterKeyId")


def test_a_queue_of_another_name_stays_as_it_is(aws: Aws) -> None:
    """kombu's translation gives `a.b` and `a-b` one name."""
    address = replace(read(aws.broker()), celery=True)
    make_missing(address, lists_of(address, [("a.b", "1")]))
    before = attributes(aws, "pen-penstock_queue_a-b")
    lost = [name for name in lists_of(address, [("a-b", "1")]) if "@" not in name]
    (_, wrong) = Setup(replace(address, visibility=99)).provide(queue_specs(replace(address, visibility=99), lost, {}))
    assert wrong.action == "wrong"
    assert "it is the queue of penstock:queue:a.b" in str(wrong.details)
    assert attributes(aws, "pen-penstock_queue_a-b") == before


def test_a_worker_makes_only_what_is_missing(aws: Aws) -> None:
    address = read(aws.broker())
    names = lists_of(address, MODELS)
    sqs = aws.client("sqs")
    sqs.create_queue(QueueName=sqs_name(address, names[0]), Attributes={"VisibilityTimeout": "33"})
    made = make_missing(address, names)
    assert made == ["pen-dead-letters", *(sqs_name(address, name) for name in names[1:])]
    assert attributes(aws, sqs_name(address, names[0]))["VisibilityTimeout"] == "33"
    assert make_missing(address, names) == []


def test_chosen_queues_are_checked_and_not_changed(aws: Aws) -> None:
    address = read(aws.broker())
    (name, _), *_ = lists("penstock:queue:m@1")
    sqs = aws.client("sqs")
    sqs.create_queue(QueueName="dead")
    redrive = {"deadLetterTargetArn": f"arn:aws:sqs:us-east-1:{ACCOUNT}:dead", "maxReceiveCount": 3}
    made = {"MessageRetentionPeriod": "3600", "RedrivePolicy": json.dumps(redrive), "DelaySeconds": "9"}
    url = sqs.create_queue(QueueName="theirs", Attributes=made)["QueueUrl"]
    before = attributes(aws, "theirs")
    found = Setup(address).check(name, f"arn:aws:sqs:us-east-1:{ACCOUNT}:theirs")
    assert (found.action, found.url, found.list) == ("wrong", url, name)
    assert list(found.details) == ["settings", "RedrivePolicy", "DelaySeconds"]
    assert "MessageRetentionPeriod 3600; it must be 172800 or more" in found.details["settings"]
    assert attributes(aws, "theirs") == before
    with pytest.raises(ValueError, match=r"no queue of us-east-1: its ARN is like arn:aws:sqs:us-east-1:ACCOUNT"):
        Setup(address).check(name, f"arn:aws:sqs:eu-west-1:{ACCOUNT}:theirs")
    with pytest.raises(AwsMissing, match=r"there is no queue .*nowhere"):
        Setup(address).check(name, f"arn:aws:sqs:us-east-1:{ACCOUNT}:nowhere")


def test_a_queue_of_another_account_cannot_be_made(aws: Aws) -> None:
    address = replace(read(aws.broker()), account="999999999999")
    assert own_account(address) == ACCOUNT
    with pytest.raises(AwsMissing, match="pen-dead-letters is missing in account 999999999999"):
        provide(address)
    assert "QueueUrls" not in aws.client("sqs").list_queues()


def _failing(code: str, times: int) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise ClientError({"Error": {"Code": code, "Message": "no"}}, "CreateQueue")
        return "done"

    return call


def test_throttling_is_waited_out_and_a_denial_is_not() -> None:
    pauses: list[float] = []
    assert patiently("make q", "sqs:CreateQueue", _failing("Throttling", 5), pauses.append) == "done"
    assert tuple(pauses) == PAUSES_S
    with pytest.raises(AwsError, match="Throttling") as throttled:
        patiently("make q", "sqs:CreateQueue", _failing("Throttling", 6), pauses.append)
    assert throttled.value.trouble is Trouble.AWAY
    assert patiently("make q", "", _failing("QueueDoesNotExist", 1), pauses.append, {"QueueDoesNotExist"}) == "done"
    pauses.clear()
    with pytest.raises(AwsError, match=r"cannot make q: AccessDenied: no \(it needs sqs:CreateQueue\)"):
        patiently("make q", "sqs:CreateQueue", _failing("AccessDenied", 1), pauses.append)
    assert not pauses
