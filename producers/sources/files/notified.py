"""The source type `bucket`: a bucket of S3, whose notifications come on an SQS queue.

    [uploads]
    type = "bucket"
    bucket = "s3://my-bucket"
    queue = "https://sqs.us-east-1.amazonaws.com/123456789012/uploads"

A notification is removed from the queue once its object stands in the store as open: from then on any process goes on
with it. Notifications may come twice, late, and in any order: each only says where to look.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Coroutine
from dataclasses import replace
from itertools import combinations
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from producers.connection.aws import AwsError, AwsMissing
from producers.errors import shown
from producers.sources.aws import region_of
from producers.sources.consumer import Consumer
from producers.sources.files.bucket import Bucket
from producers.sources.files.notification import read_notification
from producers.sources.files.place import is_input
from producers.sources.files.settings import InboxSettings
from producers.sources.files.source import InboxSource
from producers.sources.files.work import Work
from producers.sources.inbox import BadMessage, Received
from producers.sources.source import Context, Source, fitting
from producers.sources.sqs import SqsInbox
from producers.store.blobs import open_blobs
from producers.store.blobs.bucket import read

_URL: Final = re.compile(r"https?://[^/\s]+/\S+")
_PREFIX_FORM: Final = "what keys begin with, which ends with / and does not begin with one"


def _bucket(value: str) -> str:
    read(value)
    return value


_Prefix = Annotated[str, fitting(lambda value: value.endswith("/") and not value.startswith("/"), _PREFIX_FORM)]


class BucketSettings(InboxSettings):
    """A bucket with notifications."""

    type: Literal["bucket"]
    bucket: Annotated[str, AfterValidator(_bucket)] = Field(description="a bucket's URL, such as s3://my-bucket")
    queue: str = Field(pattern=f"^{_URL.pattern}$", description="the URL of the SQS queue for its notifications")
    dead_letters: str | None = Field(
        None, pattern=f"^{_URL.pattern}$", description="the URL of an SQS queue for messages that are no notifications"
    )
    inbox: _Prefix = Field("inbox/", description=_PREFIX_FORM)
    outbox: _Prefix = Field("outbox/", description=_PREFIX_FORM)
    done: _Prefix = Field("done/", description=_PREFIX_FORM)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        """What is written must not be taken for an input, nor results for inputs that are done."""
        parts = {name: str(getattr(self, name)) for name in ("inbox", "outbox", "done")}
        for (one, first), (other, second) in combinations(parts.items(), 2):
            if first.startswith(second) or second.startswith(first):
                raise ValueError(
                    f"{other} is {shown(second)} and {one} is {shown(first)}; neither may begin with the other"
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
        self._consumer = Consumer(name, queue, self._told)

    def unready(self) -> list[str]:
        return [trouble for trouble in (self._consumer.trouble, *super().unready()) if trouble]

    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        return [self._consumer.run()]

    async def _told(self, message: Received) -> None:
        """Take up the objects that a message names. May be called again. Raises BadMessage, and OSError."""
        for created in read_notification(message.body):
            inbox = self._bucket.bucket.key(self._bucket.inbox)
            name = created.key.removeprefix(inbox)
            if created.bucket != self._bucket.bucket.name or name == created.key or not is_input(name):
                continue
            try:
                found = await asyncio.to_thread(self._bucket.find, name, created.version)
            except AwsError as error:
                if error.trouble is not None or isinstance(error, AwsMissing):
                    raise
                raise BadMessage(str(error)) from error  # no retry mends it: a version that S3 never gave, say
            if found is not None:
                await self._work.open(found)
