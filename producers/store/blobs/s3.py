"""Blobs in a bucket of S3, or of what speaks its protocol: the object PREFIX/NAME is the blob NAME.

    write     up to a part's size: one PutObject at commit; more: a multipart upload, visible once it is completed
    join      large parts are copied within S3; smaller ones come here and go back together
    clean     aborts uploads that nobody writes to any more

Each request that writes has the CRC32 of its bytes: S3 compares it, and keeps it with the object. Errors are those of
`producers.connection.aws`: OSErrors that name the bucket and the permission.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from producers.store.blobs.base import Blobs, BlobWriter, checked
from producers.store.blobs.bucket import Bucket
from producers.store.blobs.multipart import S3Writer
from producers.store.blobs.objects import Objects


class S3Blobs(Blobs):
    """A bucket. It connects at the first call. Raises AwsNotInstalled."""

    def __init__(self, bucket: Bucket) -> None:
        self.place = bucket.url
        self.objects = Objects(bucket)

    def writer(self, name: str) -> BlobWriter:
        return S3Writer(self.objects, checked(name))

    def join(self, name: str, parts: Sequence[str]) -> int:
        with S3Writer(self.objects, checked(name)) as writer:
            for part in parts:
                writer.append(checked(part))
            writer.commit()
        return writer.size

    def size(self, name: str) -> int:
        size: int = self.objects.ask("head_object", "s3:GetObject", checked(name))["ContentLength"]
        return size

    def read(self, name: str, start: int, size: int) -> bytes:
        return self.objects.read(checked(name), start, size)

    def delete(self, name: str) -> None:
        self.objects.ask("delete_object", "s3:DeleteObject", checked(name))
        self.objects.downloads.forget(name)

    def url(self, name: str, filename: str, seconds: int) -> str | None:
        shown = f"attachment; filename*=UTF-8''{quote(filename, errors='replace')}"
        return self.objects.signed(checked(name), shown, seconds)

    def names(self, prefix: str) -> list[str]:
        return self.objects.names(prefix)

    def clean(self, older_s: float) -> int:
        return self.objects.abort_untouched(datetime.now(UTC) - timedelta(seconds=older_s))

    def check(self) -> None:
        self.objects.check()
