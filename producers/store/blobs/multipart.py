"""Writes objects of S3: small ones at once, large ones as multipart uploads, in bounded memory."""

from __future__ import annotations

import base64
import zlib
from contextlib import suppress
from typing import Any, Final, Self

from producers.connection.aws import AwsError
from producers.store.blobs.base import LEAST_PART, PIECE, BlobNotFound, BlobWriter, checked
from producers.store.blobs.objects import ANY, Content, Objects

#: Bytes of a part that is written: what a writer holds in memory, twice while it is sent. Every STEP parts they grow by
#: as many, since S3 takes 10,000 parts.
PART: Final = 8 << 20
STEP: Final = 1000
#: Most bytes that S3 copies in one request.
MAX_COPY: Final = 5 << 30


class S3Writer(BlobWriter):
    """Writes one object. Small ones are put at commit; `_upload` is the id of a multipart upload, `_parts` are its."""

    def __init__(self, requests: Objects, name: str) -> None:
        self.size = 0
        self._objects = requests
        self._name = name
        self._buffer = bytearray()
        self._upload = ""
        self._parts: list[dict[str, Any]] = []

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        self.size += len(left)
        while left:
            room = self._grown(PART) - len(self._buffer)
            self._buffer += left[:room]
            left = left[room:]
            if len(self._buffer) == self._grown(PART):
                self._flush()

    def append(self, name: str, source: Objects | None = None, content: Content = ANY) -> None:
        """Append a blob, which stays; with `source`, an object from there. Raises BlobNotFound and AwsError."""
        source = source or self._objects
        with source.opened(name, content) as (size, body):
            least = self._grown(LEAST_PART)
            missing = max(0, least - len(self._buffer)) if self._buffer else 0
            if size - missing < self._grown(LEAST_PART, 1):
                for piece in body.iter_chunks(PIECE):
                    self.write(piece)
                return
            self.write(body.read(missing))
        if self._buffer:
            self._flush()
        self._copy(name, missing, size, source, content)

    def commit(self, name: str = "") -> None:
        name = checked(name) if name else self._name
        self._objects.downloads.forget(name)
        if not self._upload:
            data = bytes(self._buffer)
            self._ask("put_object", name, Body=data, ChecksumCRC32=_crc(data), **self._objects.bucket.settings)
            return
        if self._buffer:
            self._flush()
        self._ask(
            "complete_multipart_upload", self._name, UploadId=self._upload, MultipartUpload={"Parts": self._parts}
        )
        self._upload = ""
        if name != self._name:
            with S3Writer(self._objects, name) as other:
                other.append(self._name)
                other.commit()
            self._objects.ask("delete_object", "s3:DeleteObject", self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._buffer.clear()
        if self._upload:
            with suppress(AwsError, BlobNotFound):  # else `clean` aborts it
                what = "s3:AbortMultipartUpload"
                self._objects.ask("abort_multipart_upload", what, self._name, UploadId=self._upload)
            self._upload = ""

    def _grown(self, size: int, more: int = 0) -> int:
        return size * (1 + (len(self._parts) + more) // STEP)

    def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        crc = _crc(data)
        answer = self._part("upload_part", Body=data, ChecksumCRC32=crc)
        self._parts.append({"PartNumber": len(self._parts) + 1, "ETag": answer["ETag"], "ChecksumCRC32": crc})

    def _copy(self, name: str, start: int, end: int, source: Objects, content: Content) -> None:
        """Append bytes of another object, in as few equal parts as S3 takes."""
        place = {"Bucket": source.bucket.name, "Key": source.bucket.key(name)}
        place |= {"VersionId": content.version} if content.version else {}
        same = {"CopySourceIfMatch": content.etag} if content.etag else {}
        each = -(-(end - start) // -(-(end - start) // MAX_COPY))
        for first in range(start, end, each):
            within = f"bytes={first}-{min(first + each, end) - 1}"
            copied = self._part("upload_part_copy", CopySource=place, CopySourceRange=within, **same)["CopyPartResult"]
            crc = {"ChecksumCRC32": copied["ChecksumCRC32"]} if "ChecksumCRC32" in copied else {}
            self._parts.append({"PartNumber": len(self._parts) + 1, "ETag": copied["ETag"], **crc})
        self.size += end - start

    def _part(self, call: str, **more: Any) -> dict[str, Any]:
        if not self._upload:
            begun = self._ask(
                "create_multipart_upload", self._name, ChecksumAlgorithm="CRC32", **self._objects.bucket.settings
            )
            self._upload = begun["UploadId"]
        return self._ask(call, self._name, UploadId=self._upload, PartNumber=len(self._parts) + 1, **more)

    def _ask(self, call: str, name: str, **more: Any) -> dict[str, Any]:
        return self._objects.ask(call, "s3:PutObject", name, **more)


def _crc(data: bytes) -> str:
    """CRC32 as S3 writes it: big-endian, in base64."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4)).decode()
