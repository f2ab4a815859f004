"""Each process's policy lets it do what it does, and nothing else: by AWS's rules, as moto enforces them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
from redis import Redis

from producers.aws.account import Needs, probe, provide
from producers.aws.bucket import DONE, INBOX, OUTBOX
from producers.aws.policies import OF_TIERS, Scope, policy
from producers.broker.sqs.address import read, sqs_name
from producers.broker.sqs.specs import dead_letters_name, inbox_name, lists_of
from producers.connection.aws import AwsError, aws_errors, client
from producers.connection.trouble import Trouble
from producers.sources.files.bucket import Bucket as Inbox
from producers.store.blobs.bucket import Bucket
from producers.store.blobs.s3 import S3Blobs
from tests.aws import ACCOUNT, REGION, Aws
from tests.producers.aws.users import user

MODELS: Final = [("tiny", "4f1c00000000")]
BUCKET: Final = "penstock-files"
SEND, RECEIVE, PUT_DOWN, LOOK, READ, WRITE = "send", "receive", "put down", "look", "read", "write"
#: What each process may do with: tiers' queues, dead letters, inbox, files, inbox/ and outbox/ of the bucket.
MAY: Final = {
    "producer": {"tier": {SEND, LOOK}, "files": {READ}},
    "gateway": {"tier": {SEND, LOOK}, "files": {READ, WRITE}},
    "worker": {"tier": {SEND, LOOK, RECEIVE, PUT_DOWN}, "files": {READ, WRITE}},
    "sweeper": {"tier": {SEND, LOOK, PUT_DOWN}, "files": {READ, WRITE}},
    "sources": {
        "tier": {SEND, LOOK},
        "inbox": {LOOK, RECEIVE, PUT_DOWN},
        "files": {READ, WRITE},
        "inbox/": {READ},
        "outbox/": {READ, WRITE},
    },
}


@contextmanager
def acting_as(aws: Aws, monkeypatch: pytest.MonkeyPatch, role: str) -> Iterator[None]:
    """Within it, boto3 finds credentials of a user with the role's policy, and moto enforces it."""
    scope = Scope(read(aws.broker()), ACCOUNT, files=Bucket(BUCKET, "files"), inbox=BUCKET)
    credentials = user(aws, role, scope)
    with monkeypatch.context() as patched:
        for name, value in credentials.items():
            patched.setenv(name, value)
        with aws.enforcing():
            yield


@pytest.fixture
def needs(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Needs:
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    return Needs(read(aws.broker()), MODELS, bucket=Bucket(BUCKET, "files"), inbox=True)


def calls(needs: Needs) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Place, kind of access, and a call that needs it."""
    sqs, s3 = client("sqs", REGION, needs.address.endpoint_url), client("s3", REGION)
    queues = {
        "tier": sqs_name(needs.address, lists_of(needs.address, MODELS)[0]),
        "dead letters": dead_letters_name("pen-", False),
        "inbox": inbox_name("pen-"),
    }
    for place, name in queues.items():
        url = {"QueueUrl": f"{needs.address.endpoint_url}/{ACCOUNT}/{name}"}
        yield place, SEND, lambda url=url: sqs.send_message(**url, MessageBody="m")
        yield place, LOOK, lambda url=url: sqs.get_queue_attributes(**url, AttributeNames=["All"])
        yield place, RECEIVE, lambda url=url: sqs.receive_message(**url)
        yield place, PUT_DOWN, lambda url=url: sqs.delete_message(**url, ReceiptHandle="r")
        yield (
            place,
            PUT_DOWN,
            lambda url=url: sqs.change_message_visibility(**url, ReceiptHandle="r", VisibilityTimeout=0),
        )
        yield place, "make", lambda url=url: sqs.set_queue_attributes(**url, Attributes={"DelaySeconds": "0"})
    for place in ("files", "inbox/", "outbox/", "others/"):
        key = {"Bucket": BUCKET, "Key": f"{place.rstrip('/')}/o"}
        yield place, READ, lambda key=key: s3.get_object(**key)
        yield place, WRITE, lambda key=key: s3.put_object(**key, Body=b"o")
    yield "bucket", "make", lambda: s3.put_public_access_block(Bucket=BUCKET, PublicAccessBlockConfiguration={})


@pytest.mark.parametrize("role", OF_TIERS)
def test_a_process_may_do_its_own_things_alone(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, needs: Needs, role: str
) -> None:
    provide(needs, None, apply=True)
    denied, done = set(), set()
    with acting_as(aws, monkeypatch, role):
        for place, kind, call in calls(needs):
            try:
                with aws_errors(f"use {place}", "the permission"):
                    call()
            except AwsError as error:
                (denied if error.trouble is Trouble.DENIED else done).add((place, kind))
            else:
                done.add((place, kind))
    assert done == {(place, kind) for place, kinds in MAY[role].items() for kind in kinds}
    assert not denied & done


def test_setup_may_make_and_change_all_that_it_makes(aws: Aws, monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    with acting_as(aws, monkeypatch, "setup"):
        assert {one.action for one in provide(needs, None, apply=True)} == {"create"}
        assert {one.action for one in provide(needs, None, apply=False)} == {"keep"}


def test_files_are_written_joined_and_read(aws: Aws, monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    provide(needs, None, apply=True)
    large = b"x" * (20 << 20)  # more than a part: a multipart upload
    with acting_as(aws, monkeypatch, "gateway"):
        blobs = S3Blobs(Bucket(BUCKET, "files"))
        with blobs.writer("large") as writer:
            writer.write(large)
            writer.commit()
        blobs.join("joined", ["large", "large"])
        assert (blobs.size("joined"), blobs.read("joined", len(large), 4)) == (2 * len(large), b"xxxx")
        blobs.delete("large")
        blobs.clean(0)
        blobs.check()


def test_sources_take_a_file_and_write_its_results(aws: Aws, monkeypatch: pytest.MonkeyPatch, needs: Needs) -> None:
    provide(needs, None, apply=True)
    large = b"x" * (20 << 20)
    aws.client("s3").put_object(Bucket=BUCKET, Key=f"{INBOX}day.jsonl", Body=large)
    with acting_as(aws, monkeypatch, "sources"):
        files = S3Blobs(Bucket(BUCKET, "files"))
        place = Inbox(Bucket(BUCKET), INBOX, OUTBOX, DONE, moves=True)
        place.open()
        found = place.find("day.jsonl")
        assert found is not None
        assert place.read(found, 0, 4) == b"xxxx"
        assert place.copy(found, files, "input", lambda: False) == len(large)
        place.write_blob("day.jsonl", files, "input", lambda: False)
        place.leave(found)
        assert place.find("day.jsonl") is None


def test_a_denied_action_is_told_with_its_queue_and_permission(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, needs: Needs, valkey: Redis
) -> None:
    provide(needs, valkey, apply=True)
    with acting_as(aws, monkeypatch, "producer"):
        (*queues, bucket) = probe("worker", needs, valkey)
        with pytest.raises(AwsError, match=r"settings of queue pen-dead-letters: [^$]*needs sqs:GetQueueAttributes"):
            provide(needs, None, apply=False)
    assert {one.action for one in queues} == {"wrong"}
    assert list(queues[0].details) == ["sqs:DeleteMessage", "sqs:ChangeMessageVisibility"]
    said = queues[0].details["sqs:DeleteMessage"]
    assert said.startswith(f"cannot put down messages of queue {queues[0].name} in {REGION}: ")
    assert said.endswith("(it needs sqs:DeleteMessage)")
    assert list(bucket.details) == ["s3:ListBucket"]


def test_sources_look_for_the_inbox_too(aws: Aws, needs: Needs, valkey: Redis) -> None:
    provide(replace(needs, inbox=False), valkey, apply=True)
    assert [one.name for one in probe("sources", needs, valkey) if one.action == "wrong"] == ["pen-inbox"]
    provide(needs, valkey, apply=True)
    assert {one.action for one in probe("sources", needs, valkey)} == {"keep"}


def test_chosen_queues_keys_and_replies_are_named() -> None:
    chosen, topic, key = f"arn:aws:sqs:{REGION}:1:q", f"arn:aws:sns:{REGION}:1:t", f"arn:aws:kms:{REGION}:1:key/k"
    scope = Scope(read("sqs://us-east-1"), "1", chosen=(chosen,), replies=(chosen, topic), kms_keys=(key,))
    by_sid = {one["Sid"]: one for one in policy("sources", scope)["Statement"]}
    assert by_sid["Tiers"]["Resource"] == [chosen]
    assert (by_sid["ReplyTopics"]["Action"], by_sid["ReplyTopics"]["Resource"]) == (["sns:Publish"], [topic])
    assert by_sid["Keys"] == {
        "Sid": "Keys",
        "Effect": "Allow",
        "Action": ["kms:GenerateDataKey", "kms:Decrypt"],
        "Resource": [key],
    }


def test_links_of_celery_go_to_queues_of_any_name() -> None:
    by_sid = {one["Sid"]: one for one in policy("worker", Scope(read("sqs://us-east-1?celery=1"), "1"))["Statement"]}
    assert by_sid["Celery"]["Action"] == ["sqs:SendMessage"]
    assert by_sid["Celery"]["Resource"] == [f"arn:aws:sqs:{REGION}:1:pen-*"]
    assert by_sid["Tiers"]["Resource"][-1] == f"arn:aws:sqs:{REGION}:1:pen-penstock_queue_*"


def test_arns_are_those_of_the_region() -> None:
    scope = Scope(read("sqs://cn-north-1?fifo=1"), "1", files=Bucket("b"))
    tiers, _, bucket, _ = policy("gateway", scope)["Statement"]
    assert tiers["Resource"][0] == "arn:aws-cn:sqs:cn-north-1:1:pen-*-priority.fifo"
    assert bucket["Resource"] == ["arn:aws-cn:s3:::b"]
