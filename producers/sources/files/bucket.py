"""The source type `bucket`: a bucket of S3, or of a server with its protocol, whose notifications come on an SQS queue.

    [uploads]
    type = "bucket"
    bucket = "s3://my-bucket"
    queue = "https://sqs.us-east-1.amazonaws.com/123456789012/uploads"

    s3://bucket/inbox/a/b.jsonl    ─▶ batch ─▶    s3://bucket/outbox/a/b.jsonl, s3://bucket/outbox/a/b.errors.jsonl
                                                  s3://bucket/done/a/b.jsonl, if inputs are moved

A notification is removed from the queue once its object stands in the store as open: from then on any process goes on
with it. Notifications may come twice, late, and in any order: each only says where to look. They come in these forms:

    S3 itself        {"Records": [{"eventName": "ObjectCreated:Put", "s3": {...}}]}; keys are URL-encoded
    through SNS      {"Type": "Notification", "Message": "<the same, as text>"}, or the same as it is (raw delivery)
    EventBridge      {"source": "aws.s3", "detail-type": "Object Created", "detail": {...}}; keys are as they are
    a test           {"Event": "s3:TestEvent", ...}, once, when notifications are set up

An object's stamp is its version, where the bucket has versions, and its ETag. It is read in ranges, each on the
condition that it has this ETag, so no connection has to last for gigabytes. Where files' content is in S3 as well,
S3 copies both ways.

Sources: docs.aws.amazon.com/AmazonS3/latest/userguide, "Event message structure" and "Using EventBridge".
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Annotated, Any, Final, Literal, Self, TypeGuard
from urllib.parse import unquote_plus

from pydantic import AfterValidator, Field, model_validator

from producers.connection.aws import AwsError, AwsMissing
from producers.errors import shown
from producers.sources.aws import region_of
from producers.sources.files.work import ERRORS, SUFFIX, InboxSettings, InboxSource, Location, Replaced, Work, is_input
from producers.sources.inbox import BadMessage, Consumer, Received, SqsInbox
from producers.sources.source import Context, Source, fitting
from producers.store.blobs import BlobNotFound, Blobs, open_blobs
from producers.store.blobs.bucket import Bucket as Url
from producers.store.blobs.bucket import read
from producers.store.blobs.s3 import Content, Objects, S3Blobs, S3Writer
from producers.store.inbox import InboxObject

#: Longest key, in bytes.
LONGEST: Final = 1024
#: Additions of an outbox to an object's name, as in a folder.
ADDED: Final = len(".batch_") + 32 + len(ERRORS) - len(SUFFIX)
#: S3's answers for an object that has another ETag by now, or whose last version is that it was deleted.
_OTHER: Final = frozenset({"412", "PreconditionFailed", "405", "MethodNotAllowed"})
#: The version of an object that was written while its bucket kept none.
_UNVERSIONED: Final = "null"
#: Envelopes around a message: EventBridge may send to SNS, which sends to SQS.
MAX_ENVELOPES: Final = 3
_CREATED: Final = ("ObjectCreated:", "s3:ObjectCreated:")
_URL: Final = re.compile(r"https?://[^/\s]+/\S+")
_PREFIX_FORM: Final = "what keys begin with, which ends with / and does not begin with one"
_Prefix = Annotated[str, fitting(lambda value: value.endswith("/") and not value.startswith("/"), _PREFIX_FORM)]


class Bucket(Location):
    """A bucket, or a part of it (`url.prefix`). `inbox`, `outbox`, `done`: with `/` at their ends.

    Raises AwsNotInstalled, and AwsError without a region.
    """

    def __init__(self, url: Url, inbox: str, outbox: str, done: str, *, moves: bool) -> None:
        self.bucket, self.inbox = url, inbox
        self.name = f"{url}/{inbox}"
        self.moves = moves
        self._outbox, self._done = outbox, done
        self._objects = Objects(url)

    def open(self) -> None:
        """Raise AwsError unless the bucket is there, and may be listed: else a missing object looks forbidden."""
        self._objects.check()

    def url(self, name: str) -> str:
        return f"{self.name}{name}"

    def find(self, name: str, version: str = "") -> InboxObject | None:
        """Returns the object, in this version or as it is now; None if it is gone."""
        content = Content("" if version == _UNVERSIONED else version)
        try:
            with _replaced():
                head = self._objects.request("head_object", "s3:GetObject", self.inbox + name, **content.arguments)
        except Replaced:
            return None
        version = head.get("VersionId", _UNVERSIONED)
        return InboxObject(
            name, f"{'' if version == _UNVERSIONED else version} {head['ETag']}", int(head["ContentLength"])
        )

    def refusal(self, name: str) -> str | None:
        keys = (self.bucket.key(part + name).encode() for part in (self._outbox, self._done))
        results, done = map(len, keys)
        too_long = max(results + ADDED, done) > LONGEST
        return f"its key in {self._outbox} or {self._done} would have more than {LONGEST} bytes" if too_long else None

    def read(self, item: InboxObject, start: int, size: int) -> bytes:
        with _replaced():
            return self._objects.read(self.inbox + item.name, start, size, _content(item))

    def copy(self, item: InboxObject, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> int:
        if not self._is_beside(blobs):
            return super().copy(item, blobs, blob, stopped)
        with _replaced(), S3Writer(blobs.objects, blob) as writer:
            writer.append(self.inbox + item.name, self._objects, _content(item))
            writer.commit()
        return writer.size

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        with S3Writer(self._objects, self._outbox + name) as writer:
            for piece in pieces:
                writer.write(piece)
            writer.commit()

    def write_blob(self, name: str, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> None:
        if not self._is_beside(blobs):
            return super().write_blob(name, blobs, blob, stopped)
        with S3Writer(self._objects, self._outbox + name) as writer:
            writer.append(blob, blobs.objects)
            writer.commit()

    def leave(self, item: InboxObject) -> None:
        if self.find(item.name) != item:
            return
        content, key = _content(item), self.inbox + item.name
        try:
            with _replaced():
                with S3Writer(self._objects, self._done + item.name) as writer:
                    writer.append(key, None, content)
                    writer.commit()
                self._objects.request("delete_object", "s3:DeleteObject", key, IfMatch=content.etag)
        except Replaced:  # a new content, which has its own notification
            return

    def _is_beside(self, blobs: Blobs) -> TypeGuard[S3Blobs]:
        """Whether S3 can copy between the bucket and the blobs."""
        return isinstance(blobs, S3Blobs) and blobs.objects.bucket.endpoint_url == self.bucket.endpoint_url


def _content(item: InboxObject) -> Content:
    return Content(*item.stamp.split(" ", 1))


@contextmanager
def _replaced() -> Iterator[None]:
    """Raises Replaced if the object is gone, or has another content."""
    try:
        yield
    except BlobNotFound as error:
        raise Replaced from error
    except AwsError as error:
        if error.code in _OTHER:
            raise Replaced from error
        raise


@dataclass(frozen=True, slots=True)
class Created:
    """An object was written. `version`: empty where its bucket has none."""

    bucket: str
    key: str
    version: str = ""


def read_notification(body: str) -> list[Created]:
    """Returns the written objects that a message names; none for a test, or for other events. Raises BadMessage."""
    message = _object(body)
    for _ in range(MAX_ENVELOPES):
        if message.get("Type") != "Notification" or not isinstance(message.get("Message"), str):
            break
        message = _object(message["Message"])
    if message.get("Event") == "s3:TestEvent":
        return []
    try:
        if isinstance(message.get("Records"), list):
            return [_record(each) for each in message["Records"] if each["eventName"].startswith(_CREATED)]
        if message.get("source") == "aws.s3":
            return [_event(message["detail"])] if message["detail-type"] == "Object Created" else []
    except (KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"it is no notification of S3 as documented: {type(error).__name__} {error}") from None
    raise BadMessage(f"it is no notification of S3: it has neither Records nor the source aws.s3: {shown(body)}")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadMessage(f"it is {shown(value)}; a notification of S3 is a JSON object")
    return value


def _record(record: Any) -> Created:
    s3 = record["s3"]
    key, version = s3["object"]["key"], s3["object"].get("versionId")
    return Created(str(s3["bucket"]["name"]), unquote_plus(key), str(version or ""))


def _event(detail: Any) -> Created:
    s3_object = detail["object"]
    return Created(str(detail["bucket"]["name"]), str(s3_object["key"]), str(s3_object.get("version-id") or ""))


def _bucket_url(value: str) -> str:
    read(value)
    return value


class BucketSettings(InboxSettings):
    """A bucket with notifications."""

    type: Literal["bucket"]
    bucket: Annotated[str, AfterValidator(_bucket_url)] = Field(description="a bucket's URL, such as s3://my-bucket")
    queue: str = Field(pattern=f"^{_URL.pattern}$", description="the URL of the SQS queue for its notifications")
    dead_letters: str | None = Field(
        None, pattern=f"^{_URL.pattern}$", description="the URL of an SQS queue for messages that are no notifications"
    )
    inbox: _Prefix = Field("inbox/", description=_PREFIX_FORM)
    outbox: _Prefix = Field("outbox/", description=_PREFIX_FORM)
    done: _Prefix = Field("done/", description=_PREFIX_FORM)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        """Refuses prefixes that overlap: a result must not be taken for an input, nor for an input that is done."""
        parts = {name: str(getattr(self, name)) for name in ("inbox", "outbox", "done")}
        for (name, prefix), (other, other_prefix) in combinations(parts.items(), 2):
            if prefix.startswith(other_prefix) or other_prefix.startswith(prefix):
                raise ValueError(
                    f"{other} is {shown(other_prefix)} and {name} is {shown(prefix)}; neither may begin with the other"
                )
        return self

    def source(self, name: str, context: Context) -> Source:
        return BucketSource(name, context, self)


SETTINGS = BucketSettings


class BucketSource(InboxSource):
    """Batches of a bucket's objects."""

    def __init__(self, name: str, context: Context, settings: BucketSettings) -> None:
        url = read(settings.bucket)
        url = url if url.region else replace(url, region=region_of(settings.queue) or "")
        self._bucket = Bucket(url, settings.inbox, settings.outbox, settings.done, moves=settings.after == "move")
        super().__init__(name, self._bucket, Work(name, context, self._bucket, open_blobs(context.files_dir), settings))
        queue = SqsInbox(
            settings.queue, dead_letters=settings.dead_letters, region=url.region, endpoint_url=url.endpoint_url
        )
        refused = partial(context.outcomes.add, name, "refused")
        self._consumer = Consumer(name, queue, self._on_notification, buried=refused)

    def unready(self) -> list[str]:
        return [trouble for trouble in (self._consumer.trouble, *super().unready()) if trouble]

    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        return [self._consumer.run()]

    async def _on_notification(self, message: Received) -> None:
        """Open the objects that a message names. May be called again. Raises BadMessage and OSError."""
        for created in read_notification(message.body):
            inbox = self._bucket.bucket.key(self._bucket.inbox)
            name = created.key.removeprefix(inbox)
            if created.bucket != self._bucket.bucket.name or name == created.key or not is_input(name):
                continue
            try:
                item = await asyncio.to_thread(self._bucket.find, name, created.version)
            except AwsError as error:
                if error.trouble is not None or isinstance(error, AwsMissing):
                    raise
                raise BadMessage(str(error)) from error  # no retry helps, for example with a version that S3 never gave
            if item is not None:
                await self._work.open(item)
