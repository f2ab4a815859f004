"""What S3 says of an object, by whichever way; and what is none of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from producers.sources.files.bucket import Created, read_notification
from producers.sources.inbox import BadMessage

#: As in "Event message structure" of the user guide, shortened.
RECORD: dict[str, Any] = {
    "eventVersion": "2.1",
    "eventSource": "aws:s3",
    "eventName": "ObjectCreated:CompleteMultipartUpload",
    "s3": {
        "s3SchemaVersion": "1.0",
        "bucket": {"name": "b", "arn": "arn:aws:s3:::b"},
        "object": {
            "key": "inbox/a+b%2B%C3%BC.jsonl",
            "size": 1024,
            "eTag": "d41d",
            "versionId": "v1",
            "sequencer": "00",
        },
    },
}
DIRECT = {"Records": [RECORD]}
#: As in "EventBridge event message structure".
EVENT = {
    "version": "0",
    "detail-type": "Object Created",
    "source": "aws.s3",
    "detail": {
        "bucket": {"name": "b"},
        "object": {"key": "inbox/a b+ü.jsonl", "version-id": "v1"},
        "reason": "PutObject",
    },
}
WANTED = [Created("b", "inbox/a b+ü.jsonl", "v1")]


def wrapped(body: Any) -> dict[str, str]:
    return {"Type": "Notification", "TopicArn": "arn:aws:sns:us-east-1:1:t", "Message": json.dumps(body)}


@pytest.mark.parametrize("body", [DIRECT, wrapped(DIRECT), EVENT, wrapped(EVENT)])
def test_each_way_names_the_same_object(body: Any) -> None:
    assert read_notification(json.dumps(body)) == WANTED


def test_one_message_may_have_several_objects_and_other_events() -> None:
    removed = RECORD | {"eventName": "ObjectRemoved:Delete"}
    other = json.loads(json.dumps(RECORD).replace("a+b", "c").replace('"versionId": "v1", ', ""))
    found = read_notification(json.dumps({"Records": [RECORD, removed, other]}))
    assert found == [*WANTED, Created("b", "inbox/c+ü.jsonl")]


@pytest.mark.parametrize(
    "body",
    [
        {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "b"},
        wrapped({"Event": "s3:TestEvent"}),
        EVENT | {"detail-type": "Object Deleted"},
        {"Records": []},
    ],
)
def test_what_makes_nothing(body: Any) -> None:
    assert read_notification(json.dumps(body)) == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 100_000,
        json.dumps({"Records": [{}]}),
        json.dumps({"Records": ["x"]}),
        json.dumps({"Records": [RECORD | {"s3": None}]}),
        json.dumps({"Records": [RECORD | {"s3": {"bucket": {"name": "b"}, "object": {"key": 7}}}]}),
        json.dumps(EVENT | {"detail": {}}),
        json.dumps({"source": "aws.s3"}),
        json.dumps({"source": "aws.ec2", "detail-type": "Object Created"}),
        json.dumps(wrapped(DIRECT) | {"Message": "hello"}),
    ],
)
def test_what_is_no_notification(body: str) -> None:
    with pytest.raises(BadMessage):
        read_notification(body)
