"""A bucket of S3, or of what speaks its protocol.

    s3://bucket/inbox/a/b.jsonl    ─▶ batch ─▶    s3://bucket/outbox/a/b.jsonl, s3://bucket/outbox/a/b.errors.jsonl
                                                  s3://bucket/done/a/b.jsonl, if inputs are moved

An object's stamp is its version, where the bucket has versions, and its ETag. It is read in ranges, each on the
condition that it has this ETag, so no connection has to last for gigabytes. Where files' content is in S3 as well,
S3 copies both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeGuard

from producers.connection.aws import AwsError
from producers.sources.files.place import ERRORS, SUFFIX, Place, Replaced
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.blobs.bucket import Bucket as Url
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


class Bucket(Place):
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
        """The object, in this version or as it is now. None: it is gone."""
        wanted = Content("" if version == _UNVERSIONED else version)
        try:
            with _replaced():
                head = self._objects.request("head_object", "s3:GetObject", self.inbox + name, **wanted.arguments)
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

    def read(self, found: InboxObject, start: int, size: int) -> bytes:
        with _replaced():
            return self._objects.read(self.inbox + found.name, start, size, _content(found))

    def copy(self, found: InboxObject, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> int:
        if not self._is_beside(blobs):
            return super().copy(found, blobs, blob, stopped)
        with _replaced(), S3Writer(blobs.objects, blob) as writer:
            writer.append(self.inbox + found.name, self._objects, _content(found))
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

    def leave(self, found: InboxObject) -> None:
        if self.find(found.name) != found:
            return
        content, key = _content(found), self.inbox + found.name
        try:
            with _replaced():
                with S3Writer(self._objects, self._done + found.name) as writer:
                    writer.append(key, None, content)
                    writer.commit()
                self._objects.request("delete_object", "s3:DeleteObject", key, IfMatch=content.etag)
        except Replaced:  # a new content, which has a notification of its own
            return

    def _is_beside(self, blobs: Blobs) -> TypeGuard[S3Blobs]:
        """Whether S3 can copy between the bucket and the blobs."""
        return isinstance(blobs, S3Blobs) and blobs.objects.bucket.endpoint_url == self.bucket.endpoint_url


def _content(found: InboxObject) -> Content:
    return Content(*found.stamp.split(" ", 1))


@contextmanager
def _replaced() -> Iterator[None]:
    """Raises Replaced where the object is gone, or another one."""
    try:
        yield
    except BlobNotFound as error:
        raise Replaced from error
    except AwsError as error:
        if error.code in _OTHER:
            raise Replaced from error
        raise
