"""Requests to S3 for the objects under a bucket's prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import BytesIO
from typing import Any, Final

from producers.connection.aws import AwsError, AwsMissing, aws_errors, client
from producers.store.blobs.base import BlobNotFound
from producers.store.blobs.bucket import Bucket
from producers.store.blobs.downloads import Answer, Downloads

#: The code of a HEAD's error: it has no body that could say more.
_HEAD: Final = "404"


@dataclass(frozen=True, slots=True)
class Content:
    """One content that an object has, or had: requests for it fail once it is another one. Empty: any."""

    version: str = ""
    etag: str = ""

    @property
    def asked(self) -> dict[str, str]:
        """Arguments of GetObject and HeadObject."""
        return {name: value for name, value in (("VersionId", self.version), ("IfMatch", self.etag)) if value}


ANY: Final = Content()


class Objects:
    """Requests to one bucket, whose errors name it. Threads may share it."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._s3 = client("s3", bucket.region, bucket.endpoint_url)
        self.downloads = Downloads(self._answer)

    def ask(self, call: str, permission: str, name: str, **more: Any) -> dict[str, Any]:
        """The answer to a request for one object. Raises BlobNotFound and AwsError."""
        with self._told(call, permission, name):
            answer: dict[str, Any] = getattr(self._s3, call)(Bucket=self.bucket.name, Key=self.bucket.key(name), **more)
            return answer

    def read(self, name: str, start: int, size: int, content: Content = ANY) -> bytes:
        """Up to `size` bytes; fewer only at the end of the object."""
        return self.downloads.read((name, content), start, size) if size > 0 else b""

    def _answer(self, what: tuple[str, Content], start: int, end: int | None) -> Answer:
        # Without a range S3 sends the checksum of the whole, which boto3 compares at its end.
        name, content = what
        within = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            body = self.ask("get_object", "s3:GetObject", name, **within, **content.asked)["Body"]
        except AwsError as error:
            if error.code != "InvalidRange":  # it begins behind the object's end
                raise
            body = BytesIO()
        return _Answer(body, lambda: self._told("get_object", "s3:GetObject", name))

    @contextmanager
    def opened(self, name: str, content: Content = ANY) -> Iterator[tuple[int, Any]]:
        """An object's size, and its bytes as they come."""
        found = self.ask("get_object", "s3:GetObject", name, **content.asked)
        with closing(found["Body"]) as body, self._told("get_object", "s3:GetObject", name):
            yield found["ContentLength"], body

    def signed(self, name: str, disposition: str, seconds: int) -> str:
        """A URL by which anybody may read the object for so long."""
        what = {
            "Bucket": self.bucket.name,
            "Key": self.bucket.key(name),
            "ResponseContentDisposition": disposition,
            "ResponseContentType": "application/octet-stream",
        }
        with self._told("sign a URL for", "s3:GetObject", name):
            url: str = self._s3.generate_presigned_url("get_object", what, seconds)
            return url

    def check(self) -> None:
        """Raise AwsError unless the bucket is there and lets us look into it."""
        try:
            with aws_errors(f"reach {self.bucket}", "s3:ListBucket"):
                self._s3.head_bucket(Bucket=self.bucket.name)
        except AwsMissing as error:
            text = f"there is no bucket {self.bucket.name} for {self.bucket}; check its name, region and endpoint_url"
            raise AwsMissing(text, "NoSuchBucket", None) from error

    def names(self, prefix: str) -> list[str]:
        """The names of all objects that begin so."""
        whole = self.bucket.key(prefix)
        with aws_errors(f"list objects in {self.bucket}", "s3:ListBucket"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket.name, Prefix=whole)
            found = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return [name[len(whole) - len(prefix) :] for name in found]

    def abort_untouched(self, before: datetime) -> int:
        """Abort uploads that nobody has written to since. Returns how many."""
        aborted = 0
        with aws_errors(f"list uploads to {self.bucket}", "s3:ListBucketMultipartUploads"):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket.name, Prefix=self.bucket.key()
            )
            found = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in found:
            if upload["Initiated"] < before and self._written(upload) < before:
                aborted += self._abort(upload)
        return aborted

    def _written(self, upload: dict[str, Any]) -> datetime:
        """When an upload got its last part."""
        begun: datetime = upload["Initiated"]
        with (
            suppress(AwsMissing),
            aws_errors(f"list parts of an upload to {self.bucket}", "s3:ListMultipartUploadParts"),
        ):
            pages = self._s3.get_paginator("list_parts").paginate(
                Bucket=self.bucket.name, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            times = [part["LastModified"] for page in pages for part in page.get("Parts", ())]
            return max(times, default=begun)
        return begun

    def _abort(self, upload: dict[str, Any]) -> bool:
        with suppress(AwsMissing), aws_errors(f"abort an upload to {self.bucket}", "s3:AbortMultipartUpload"):
            self._s3.abort_multipart_upload(Bucket=self.bucket.name, Key=upload["Key"], UploadId=upload["UploadId"])
            return True
        return False

    @contextmanager
    def _told(self, call: str, permission: str, name: str) -> Iterator[None]:
        try:
            with aws_errors(f"{call.replace('_', ' ')} {name} in {self.bucket}", permission):
                yield
        except AwsMissing as error:
            if error.code not in ("NoSuchKey", "NoSuchVersion", _HEAD):
                raise
            if error.code == _HEAD:
                self.check()
            raise BlobNotFound(f"there is no blob {name} in {self.bucket}") from None


class _Answer:
    """The bytes of an answer, as they come. `telling`: within it, errors of the connection become those of `ask`."""

    def __init__(self, body: Any, telling: Callable[[], AbstractContextManager[None]]) -> None:
        self._body = body
        self._telling = telling

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end."""
        pieces: list[bytes] = []
        with self._telling():
            while size and (piece := self._body.read(size)):
                pieces.append(piece)
                size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._body.close()
