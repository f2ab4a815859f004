"""What is S3's own: URLs of buckets, refusals, uploads that die, encryption, signed URLs."""

from __future__ import annotations

import json
import random
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import pytest

from producers.connection.aws import AwsError, AwsMissing
from producers.connection.trouble import Trouble
from producers.store.blobs import BlobNotFound, Blobs, open_blobs, valid_location
from producers.store.blobs.base import PIECE
from producers.store.blobs.bucket import Bucket, lifecycle, read
from producers.store.blobs.s3 import MAX_OPEN, MIN_OPEN_READ, PART
from producers.store.servers import ServerRefused, check_files
from tests.aws import Aws
from tests.processes import free_port


def bucket_of(aws: Aws, **options: str) -> str:
    """The URL of a new bucket."""
    aws.client("s3").create_bucket(Bucket="files")
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"s3://files/pen/stock?region=us-east-1&endpoint_url={aws.url}{more}"


def put(blobs: Blobs, name: str, data: bytes = b"") -> None:
    with blobs.writer(name) as writer:
        writer.write(data)
        writer.commit()


def test_a_url_is_read_and_written_again() -> None:
    whole = (
        "s3://my.files/a/b-c?region=eu-west-1&endpoint_url=http://h:1&sse=aws:kms&kms_key_id=arn:aws:kms:k/1"
        "&class=STANDARD_IA"
    )
    bucket = read(whole)
    assert bucket == Bucket("my.files", "a/b-c", "eu-west-1", "http://h:1", "aws:kms", "arn:aws:kms:k/1", "STANDARD_IA")
    assert read(bucket.url) == bucket
    assert (read("s3://bkt/").url, read("s3://bkt").key("x"), bucket.key("x")) == ("s3://bkt", "x", "a/b-c/x")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3:/bucket/x", "names no bucket"),
        ("s3://Bucket", "names no bucket"),
        ("s3://key:SECRET@bucket", "has a user or a password"),
        ("s3://bucket?endpoint_url=http://key:SECRET@minio:9000", "has a user or a password"),
        ("s3://bucket?endpoint_url=key:SECRET@minio:9000", "has a user or a password"),
        ("s3://bucket?secret_access_key=SECRET", "option secret_access_key; known"),
        ("s3://bucket/a//b", "prefix 'a//b'"),
        ("s3://bucket?sort=1", "option sort; known are region, endpoint_url, sse"),
        ("s3://bucket?region=Paris!", "region is 'Paris!'"),
        ("s3://bucket?endpoint_url=minio:9000", "must begin with http"),
        ("s3://bucket?sse=kms", "sse is 'kms'; it must be AES256, aws:kms"),
        ("s3://bucket?kms_key_id=1", "needs sse=aws:kms"),
        ("s3://bucket?class=GLACIER", "class is 'GLACIER'; it must be one that can be read at once"),
        ("gs://bucket", "neither a folder nor a URL that begins with s3://"),
    ],
)
def test_a_bad_place_is_refused_with_the_reason(url: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        valid_location(url)
    assert "SECRET" not in str(refused.value)


def test_objects_are_written_with_the_settings_of_the_url(aws: Aws) -> None:
    blobs = open_blobs(bucket_of(aws, sse="aws:kms", kms_key_id="key-1", **{"class": "STANDARD_IA"}))
    for name, size in (("small", 3), ("large", PART + 1)):
        put(blobs, name, b"x" * size)
    blobs.join("joined", ["large", "small"])
    for name in ("small", "large", "joined"):
        found = aws.client("s3").head_object(Bucket="files", Key=f"pen/stock/{name}", ChecksumMode="ENABLED")
        assert (found["ServerSideEncryption"], found["StorageClass"]) == ("aws:kms", "STANDARD_IA")
        assert "key-1" in found["SSEKMSKeyId"]


def test_a_large_part_is_copied_and_never_comes_here(aws: Aws) -> None:
    blobs = open_blobs(bucket_of(aws))
    for name, size in (("a", PART), ("b", 10), ("c", 3 * PART)):
        put(blobs, name, name.encode() * size)
    sent = _spied(blobs)
    assert blobs.join("all", ["a", "b", "c"]) == 4 * PART + 10
    assert [call for call, _ in sent if "part" in call] == [
        *("create_multipart_upload", "upload_part_copy"),
        *("upload_part", "upload_part_copy", "complete_multipart_upload"),
    ]
    assert max(size for call, size in sent if call == "upload_part") < PART
    assert blobs.read("all", PART - 1, 13) == b"a" + b"b" * 10 + b"cc"


def _spied(blobs: Any) -> list[tuple[str, int]]:
    """Each request that it sends from now on, and how many bytes it carries."""
    sent: list[tuple[str, int]] = []
    ask = blobs.objects.request

    def asked(call: str, permission: str, name: str, **more: Any) -> Any:
        sent.append((call, len(more.get("Body", b""))))
        return ask(call, permission, name, **more)

    blobs.objects.request = asked
    return sent


def test_an_upload_that_nobody_writes_to_is_aborted_and_no_other(aws: Aws) -> None:
    blobs = open_blobs(bucket_of(aws))
    s3 = aws.client("s3")
    dead = blobs.writer("dead")
    dead.write(b"x" * PART)
    s3.create_multipart_upload(Bucket="files", Key="others/file")
    assert blobs.clean(3600) == 0, "it might still be written to"
    assert blobs.clean(-60) == 1
    assert [one["Key"] for one in s3.list_multipart_uploads(Bucket="files")["Uploads"]] == ["others/file"]
    with pytest.raises(AwsError, match="dead in s3://files"):
        dead.commit()
    with pytest.raises(BlobNotFound):
        blobs.size("dead")


def test_a_signed_url_opens_one_blob_for_a_time(aws: Aws) -> None:
    blobs = open_blobs(bucket_of(aws))
    put(blobs, "a", b"content")
    url = blobs.url("a", "é.jsonl", 60)
    assert url is not None
    assert "X-Amz-Expires=60" in url
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"content"
        assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''%C3%A9.jsonl"
    with pytest.raises(HTTPError, match=r"403|404"):
        urllib.request.urlopen(url.replace("/a?", "/b?"))


def test_a_missing_bucket_is_named_whatever_is_asked(aws: Aws) -> None:
    blobs = open_blobs(f"s3://nowhere?region=us-east-1&endpoint_url={aws.url}")
    calls = [blobs.check, lambda: blobs.size("a"), lambda: blobs.read("a", 0, 1), lambda: blobs.join("b", ["a"])]
    calls += [lambda: blobs.delete("a"), lambda: blobs.clean(0), blobs.writer("a").commit]
    for call in calls:
        with pytest.raises(AwsMissing, match="s3://nowhere"):
            call()


def test_a_server_that_is_away_is_told_as_away() -> None:
    blobs = open_blobs(f"s3://files?region=us-east-1&endpoint_url=http://127.0.0.1:{free_port()}")
    with pytest.raises(AwsError, match="get object a in s3://files") as raised:
        blobs.read("a", 0, 1)
    assert raised.value.trouble is Trouble.AWAY


def test_the_bucket_takes_the_lifecycle_rules(aws: Aws) -> None:
    bucket = read(bucket_of(aws))
    s3 = aws.client("s3")
    rules = lifecycle(bucket)
    s3.put_bucket_lifecycle_configuration(Bucket="files", LifecycleConfiguration={"Rules": rules})
    (found,) = s3.get_bucket_lifecycle_configuration(Bucket="files")["Rules"]
    assert found["Filter"]["Prefix"] == "pen/stock/"
    assert found["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2}


def test_what_is_read_in_order_is_asked_for_once_and_a_lost_connection_again(aws: Aws) -> None:
    blobs = open_blobs(bucket_of(aws))
    data = bytes(range(256)) * (PART // 256)
    put(blobs, "a", data)
    sent = _spied(blobs)
    assert b"".join(blobs.read("a", at, PIECE) for at in range(0, PART, PIECE)) == data
    assert blobs.read("a", PART, PIECE) == b""
    assert len(sent) == 1
    assert blobs.read("a", 1, PIECE) == data[1 : PIECE + 1]
    (kept,) = blobs.objects.downloads._open.values()  # type: ignore[attr-defined]
    kept[0]._body.close()
    with pytest.raises(AwsError, match="total bytes expected"):
        kept[0].read(1)
    assert blobs.read("a", PIECE + 1, PIECE) == data[PIECE + 1 : 2 * PIECE + 1]


def test_many_readers_at_once_get_what_is_theirs(aws: Aws) -> None:
    blobs = open_blobs(bucket_of(aws))
    data = random.Random(1).randbytes(3 * PIECE)
    put(blobs, "a", data)

    def read(start: int) -> bytes:
        pieces = []
        while piece := blobs.read("a", start, MIN_OPEN_READ):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    with ThreadPoolExecutor(24) as pool:
        starts = [7 * k for k in range(48)]
        assert all(found == data[at:] for at, found in zip(starts, pool.map(read, starts), strict=True))
    assert len(blobs.objects.downloads._open) <= MAX_OPEN  # type: ignore[attr-defined]


def test_a_denied_action_is_named_with_its_bucket(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    place = bucket_of(aws)
    iam = aws.client("iam")
    iam.create_user(UserName="u")
    allowed = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName="u", PolicyName="p", PolicyDocument=policy)
    key = iam.create_access_key(UserName="u")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    blobs = open_blobs(place)
    with aws.enforcing():
        with pytest.raises(BlobNotFound):
            blobs.read("a", 0, 1)
        with pytest.raises(AwsError, match=r"s3://files/pen/stock: AccessDenied.*it needs s3:PutObject") as raised:
            blobs.writer("a").commit()
        assert raised.value.trouble is Trouble.DENIED
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        with pytest.raises(ServerRefused, match="cannot use --files-dir: cannot reach s3://files/pen/stock: 403"):
            check_files(place)


def test_a_missing_bucket_is_refused_at_the_start_and_one_that_is_away_is_waited_for(
    aws: Aws, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ServerRefused, match="there is no bucket nowhere"):
        check_files(f"s3://nowhere?region=us-east-1&endpoint_url={aws.url}")
    check_files(f"s3://files?region=us-east-1&endpoint_url=http://127.0.0.1:{free_port()}")
    assert "does not answer yet" in caplog.text
