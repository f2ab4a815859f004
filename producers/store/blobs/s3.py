"""Blobs in a bucket of S3, or of what speaks its protocol: the object PREFIX/NAME is the blob NAME.

    write     up to a part's size: one PutObject at commit; more: a multipart upload, visible once it is completed
    join      large parts are copied within S3; smaller ones come here and go back together
    clean     aborts uploads that nobody writes to any more

Each request that writes has the CRC32 of its bytes: S3 compares it, and keeps it with the object. Errors are those of
`producers.connection.aws`: OSErrors that name the bucket and the permission.

    S3Blobs ─▶ Objects: requests for the objects under the bucket's prefix
                 ├─▶ Downloads: an answer stays open, and the next read goes on where it stands
                 └─▶ S3Writer: small objects at once, large ones as multipart uploads, in bounded memory
"""

from __future__ import annotations

import base64
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import md5
from io import BytesIO
from typing import Any, Final, Protocol, Self
from urllib.parse import quote

from producers.connection.aws import AwsError, AwsMissing, aws_errors, client
from producers.connection.trouble import Trouble
from producers.store.blobs.base import MIN_PART, PIECE, BlobNotFound, Blobs, BlobWriter, checked
from producers.store.blobs.bucket import Bucket

#: Reads of fewer bytes (a block of a result) are requests of their own.
MIN_OPEN_READ: Final = 1 << 18
#: Most open answers, and the time (s) for which one that nobody reads stays open.
MAX_OPEN: Final = 16
IDLE_S: Final = 30.0
#: The code of a HEAD's error: it has no body that could say more.
_HEAD: Final = "404"
#: Bytes of a part that is written: what a writer holds in memory, twice while it is sent. Every STEP parts they grow by
#: as many, since S3 takes 10,000 parts.
PART: Final = 8 << 20
PARTS_PER_STEP: Final = 1000
#: Parts that an upload of copies has at most, beside some that are written: S3 takes 10,000.
MAX_PARTS: Final = 9000
#: Most bytes that S3 copies in one request. It takes 5 GiB, but a client waits for an answer for 15 s alone.
MAX_COPY: Final = 512 << 20


class Answer(Protocol):
    """An object's bytes, as they come."""

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end. Raises AwsError."""

    def close(self) -> None: ...


class Downloads:
    """Reads objects in order by one request: an answer stays open, and the next read goes on where it stopped.

    A reader that begins elsewhere gets an answer of its own. Few stay open: the longest unused is closed. Threads may
    share it.

    `request(target, start, end)`: opens an answer with an object's bytes from `start` to `end` (exclusive), or to the
    object's end if that is None. `target`: its name, and whatever else `request` needs.
    """

    def __init__(self, request: Callable[[Any, int, int | None], Answer]) -> None:
        self._request = request
        self._open: dict[tuple[tuple[str, Any], int], tuple[Answer, float]] = {}
        self._lock = threading.Lock()

    def read(self, target: tuple[str, Any], start: int, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the object. Raises as `request`."""
        answer = self._pop_open(target, start)
        if answer is not None:
            with suppress(AwsError):  # the connection was lost: ask anew
                return self._read(target, answer, start, size)
        return self._read(
            target, self._request(target, start, None if size >= MIN_OPEN_READ else start + size), start, size
        )

    def forget(self, name: str) -> None:
        """The object is gone, or another one."""
        with self._lock:
            gone = [self._open.pop(key)[0] for key in list(self._open) if key[0][0] == name]
        for answer in gone:
            answer.close()

    def _read(self, target: tuple[str, Any], answer: Answer, start: int, size: int) -> bytes:
        try:
            data = answer.read(size)
        except BaseException:
            answer.close()
            raise
        if len(data) < size or size < MIN_OPEN_READ:
            answer.close()
        else:
            self._keep(target, start + size, answer)
        return data

    def _pop_open(self, target: tuple[str, Any], start: int) -> Answer | None:
        with self._lock:
            return self._open.pop((target, start), (None, 0.0))[0]

    def _keep(self, target: tuple[str, Any], start: int, answer: Answer) -> None:
        now = time.monotonic()
        with self._lock:
            closing = [self._open.pop((target, start), (None, 0.0))[0]]
            self._open[target, start] = answer, now
            for key, (_, used) in list(self._open.items()):
                if used < now - IDLE_S or len(self._open) > MAX_OPEN:
                    closing.append(self._open.pop(key)[0])
        for old in closing:
            if old is not None:
                old.close()


@dataclass(frozen=True, slots=True)
class Content:
    """One content that an object has, or had: requests for it fail once it is another one. Empty: any."""

    version: str = ""
    etag: str = ""

    @property
    def arguments(self) -> dict[str, str]:
        """Arguments of GetObject and HeadObject."""
        return {name: value for name, value in (("VersionId", self.version), ("IfMatch", self.etag)) if value}


ANY: Final = Content()


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a bucket lists it. `size`: in bytes; `at`: when it was written (unix s)."""

    name: str
    size: int
    at: float


class Objects:
    """Requests to one bucket, whose errors name it. Threads may share it."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._s3 = client("s3", bucket.region, bucket.endpoint_url)
        self.downloads = Downloads(self._answer)

    def request(self, call: str, permission: str, name: str, **more: Any) -> dict[str, Any]:
        """The answer to a request for one object. Raises BlobNotFound and AwsError."""
        with self._blob_errors(call, permission, name):
            answer: dict[str, Any] = getattr(self._s3, call)(Bucket=self.bucket.name, Key=self.bucket.key(name), **more)
            return answer

    def read(self, name: str, start: int, size: int, content: Content = ANY) -> bytes:
        """Up to `size` bytes; fewer only at the end of the object."""
        return self.downloads.read((name, content), start, size) if size > 0 else b""

    def _answer(self, target: tuple[str, Content], start: int, end: int | None) -> Answer:
        # Without a range S3 sends the checksum of the whole, which boto3 compares at its end.
        name, content = target
        within = {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            body = self.request("get_object", "s3:GetObject", name, **within, **content.arguments)["Body"]
        except AwsError as error:
            if error.code != "InvalidRange":  # it begins behind the object's end
                raise
            body = BytesIO()
        return _Answer(body, lambda: self._blob_errors("get_object", "s3:GetObject", name))

    @contextmanager
    def opened(self, name: str, content: Content = ANY) -> Iterator[tuple[int, Any]]:
        """An object's size, and its bytes as they come."""
        answer = self.request("get_object", "s3:GetObject", name, **content.arguments)
        with closing(answer["Body"]) as body, self._blob_errors("get_object", "s3:GetObject", name):
            yield answer["ContentLength"], body

    def signed(self, name: str, disposition: str, seconds: int) -> str:
        """A URL by which anybody may read the object for so long."""
        parameters = {
            "Bucket": self.bucket.name,
            "Key": self.bucket.key(name),
            "ResponseContentDisposition": disposition,
            "ResponseContentType": "application/octet-stream",
        }
        with self._blob_errors("sign a URL for", "s3:GetObject", name):
            url: str = self._s3.generate_presigned_url("get_object", parameters, seconds)
            return url

    def check(self) -> None:
        """Raise AwsError unless the bucket is there and lets us look into it."""
        try:
            with aws_errors(f"reach {self.bucket}", "s3:ListBucket"):
                self._s3.head_bucket(Bucket=self.bucket.name)
        except AwsMissing as error:
            text = f"there is no bucket {self.bucket.name} for {self.bucket}; check its name, region and endpoint_url"
            raise AwsMissing(text, "NoSuchBucket", None) from error

    def listed(self, prefix: str) -> Iterator[Listed]:
        """All objects whose names begin so, a thousand in memory at a time."""
        whole = self.bucket.key(prefix)
        skipped = len(whole) - len(prefix)
        with aws_errors(f"list objects in {self.bucket}", "s3:ListBucket"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket.name, Prefix=whole)
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield Listed(entry["Key"][skipped:], entry["Size"], entry["LastModified"].timestamp())

    def abort_untouched(self, before: datetime, of: Callable[[str], object] = lambda key: True) -> int:
        """Abort uploads that nobody has written to since. `of`: whether those to a key are meant. Returns how many."""
        uploads = [upload for upload in self._uploads("") if of(upload["Key"])]
        return sum(self._abort(upload) for upload in uploads if not self._is_touched(upload, before))

    def is_uploading(self, since: datetime) -> bool:
        """Whether somebody has written to an upload since."""
        return any(self._is_touched(upload, since) for upload in self._uploads(""))

    def _is_touched(self, upload: dict[str, Any], since: datetime) -> bool:
        times = (part["LastModified"] for part in self._parts(upload))
        return upload["Initiated"] >= since or any(time >= since for time in times)

    def unfinished(self, name: str) -> tuple[str, dict[int, dict[str, Any]]]:
        """The id of the upload to an object that began last, and its parts by number; "" and none without one."""
        uploads = [upload for upload in self._uploads(name) if upload["Key"] == self.bucket.key(name)]
        if not uploads:
            return "", {}
        last = max(uploads, key=lambda upload: upload["Initiated"])
        return last["UploadId"], {part["PartNumber"]: part for part in self._parts(last)}

    def _uploads(self, prefix: str) -> list[dict[str, Any]]:
        """Uploads that have not ended, to objects whose names begin so."""
        with aws_errors(f"list uploads to {self.bucket}", "s3:ListBucketMultipartUploads"):
            pages = self._s3.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket.name, Prefix=self.bucket.key(prefix)
            )
            return [upload for page in pages for upload in page.get("Uploads", ())]

    def _parts(self, upload: dict[str, Any]) -> list[dict[str, Any]]:
        """An upload's parts; none once it has ended."""
        with (
            suppress(AwsMissing),
            aws_errors(f"list parts of an upload to {self.bucket}", "s3:ListMultipartUploadParts"),
        ):
            pages = self._s3.get_paginator("list_parts").paginate(
                Bucket=self.bucket.name, Key=upload["Key"], UploadId=upload["UploadId"]
            )
            return [part for page in pages for part in page.get("Parts", ())]
        return []

    def _abort(self, upload: dict[str, Any]) -> bool:
        with suppress(AwsMissing), aws_errors(f"abort an upload to {self.bucket}", "s3:AbortMultipartUpload"):
            self._s3.abort_multipart_upload(Bucket=self.bucket.name, Key=upload["Key"], UploadId=upload["UploadId"])
            return True
        return False

    @contextmanager
    def _blob_errors(self, call: str, permission: str, name: str) -> Iterator[None]:
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
    """The bytes of an answer, as they come. `blob_errors`: within it, a lost connection raises as `request` does."""

    def __init__(self, body: Any, blob_errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._body = body
        self._blob_errors = blob_errors

    def read(self, size: int) -> bytes:
        """So many bytes; fewer only at the end."""
        pieces: list[bytes] = []
        with self._blob_errors():
            while size and (piece := self._body.read(size)):
                pieces.append(piece)
                size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._body.close()


class S3Writer(BlobWriter):
    """Writes one object. Small ones are put at commit; `_upload` is the id of a multipart upload, `_parts` are its.

    `metadata`: what S3 keeps with the object, and tells with it. `resume`: an upload stays where this one ends early,
    and this one goes on with such an upload; parts that are there and equal to what is written are not sent.
    """

    def __init__(
        self, requests: Objects, name: str, metadata: Mapping[str, str] | None = None, *, resume: bool = False
    ) -> None:
        self.size = 0
        self._objects = requests
        self._settings = requests.bucket.settings | ({"Metadata": dict(metadata)} if metadata else {})
        self._name = name
        self._buffer = bytearray()
        self._upload = ""
        self._parts: list[dict[str, Any]] = []
        self._resume = resume
        self.resumed = False
        """Whether it went on with an upload."""
        self.unlisted: AwsError | None = None
        """Why it may not look for such an upload: it began its own, which does not stay."""
        self._sent: dict[int, dict[str, Any]] = {}

    def write(self, data: bytes | memoryview) -> None:
        remaining = memoryview(data)
        self.size += len(remaining)
        while remaining:
            room = self._grown(PART) - len(self._buffer)
            self._buffer += remaining[:room]
            remaining = remaining[room:]
            if len(self._buffer) == self._grown(PART):
                self._flush()

    def append(
        self,
        name: str,
        source: Objects | None = None,
        content: Content = ANY,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Append a blob, which stays; with `source`, an object from there. Raises BlobNotFound and AwsError;
        InterruptedError once it is `stopped`."""
        source = source or self._objects
        with source.opened(name, content) as (size, body):
            least = self._grown(MIN_PART)
            missing = max(0, least - len(self._buffer)) if self._buffer else 0
            if size - missing < self._grown(MIN_PART, 1):
                for piece in body.iter_chunks(PIECE):
                    self.write(piece)
                return
            self.write(body.read(missing))
        if self._buffer:
            self._flush()
        self._copy(name, missing, size, source, content, stopped)

    def commit(self, name: str = "") -> None:
        name = checked(name) if name else self._name
        self._objects.downloads.forget(name)
        if not self._upload:
            data = bytes(self._buffer)
            self._request("put_object", name, Body=data, ChecksumCRC32=_crc(data), **self._settings)
            return
        if self._buffer:
            self._flush()
        self._request(
            "complete_multipart_upload", self._name, UploadId=self._upload, MultipartUpload={"Parts": self._parts}
        )
        self._upload = ""
        if name != self._name:
            with S3Writer(self._objects, name) as other:
                other.append(self._name)
                other.commit()
            self._objects.request("delete_object", "s3:DeleteObject", self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._buffer.clear()
        if self._upload and not self._resume:
            with suppress(AwsError, BlobNotFound):  # else `clean` aborts it
                permission = "s3:AbortMultipartUpload"
                self._objects.request("abort_multipart_upload", permission, self._name, UploadId=self._upload)
            self._upload = ""

    def _grown(self, size: int, more: int = 0) -> int:
        return size * (1 + (len(self._parts) + more) // PARTS_PER_STEP)

    def _flush(self) -> None:
        data = bytes(self._buffer)
        self._buffer.clear()
        crc, number = _crc(data), len(self._parts) + 1
        self._begin()
        part = self._sent.pop(number, None)
        if part is None or not _is_part(part, data, crc):
            part = self._part("upload_part", Body=data, ChecksumCRC32=crc)
        self._parts.append({"PartNumber": number, "ETag": part["ETag"], "ChecksumCRC32": crc})

    def _copy(
        self, name: str, start: int, end: int, source: Objects, content: Content, stopped: Callable[[], bool]
    ) -> None:
        """Append bytes of another object, in as few equal parts as S3 takes."""
        copy_source = {"Bucket": source.bucket.name, "Key": source.bucket.key(name)}
        copy_source |= {"VersionId": content.version} if content.version else {}
        same = {"CopySourceIfMatch": content.etag} if content.etag else {}
        each = -(-(end - start) // min(MAX_PARTS, -(-(end - start) // MAX_COPY)))
        for first in range(start, end, each):
            if stopped():
                raise InterruptedError
            within = f"bytes={first}-{min(first + each, end) - 1}"
            copied = self._part("upload_part_copy", CopySource=copy_source, CopySourceRange=within, **same)[
                "CopyPartResult"
            ]
            crc = {"ChecksumCRC32": copied["ChecksumCRC32"]} if "ChecksumCRC32" in copied else {}
            self._parts.append({"PartNumber": len(self._parts) + 1, "ETag": copied["ETag"], **crc})
        self.size += end - start

    def _begin(self) -> None:
        """Begin the upload, or go on with one that is there."""
        if self._upload:
            return
        if self._resume:
            try:
                self._upload, self._sent = self._objects.unfinished(self._name)
                self.resumed = bool(self._upload)
            except AwsError as error:
                if error.trouble is not Trouble.DENIED:
                    raise
                self._resume, self.unlisted = False, error
        if not self._upload:
            begun = self._request("create_multipart_upload", self._name, ChecksumAlgorithm="CRC32", **self._settings)
            self._upload = begun["UploadId"]

    def _part(self, call: str, **more: Any) -> dict[str, Any]:
        self._begin()
        return self._request(call, self._name, UploadId=self._upload, PartNumber=len(self._parts) + 1, **more)

    def _request(self, call: str, name: str, **more: Any) -> dict[str, Any]:
        return self._objects.request(call, "s3:PutObject", name, **more)


def _crc(data: bytes) -> str:
    """CRC32 as S3 writes it: big-endian, in base64."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4)).decode()


def _is_part(part: Mapping[str, Any], data: bytes, crc: str) -> bool:
    """Whether a listed part has these bytes. Servers that list no checksums have the part's MD5 as its ETag."""
    if part["Size"] != len(data):
        return False
    if "ChecksumCRC32" in part:
        return bool(part["ChecksumCRC32"] == crc)
    return bool(part["ETag"].strip('"') == md5(data, usedforsecurity=False).hexdigest())


class S3Blobs(Blobs):
    """A bucket. It connects at the first call. Raises AwsNotInstalled."""

    def __init__(self, bucket: Bucket) -> None:
        self.location = bucket.url
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
        size: int = self.objects.request("head_object", "s3:GetObject", checked(name))["ContentLength"]
        return size

    def read(self, name: str, start: int, size: int) -> bytes:
        return self.objects.read(checked(name), start, size)

    def delete(self, name: str) -> None:
        self.objects.request("delete_object", "s3:DeleteObject", checked(name))
        self.objects.downloads.forget(name)

    def url(self, name: str, filename: str, seconds: int) -> str | None:
        shown = f"attachment; filename*=UTF-8''{quote(filename, errors='replace')}"
        return self.objects.signed(checked(name), shown, seconds)

    def names(self, prefix: str) -> list[str]:
        return [entry.name for entry in self.objects.listed(prefix)]

    def clean(self, older_s: float) -> int:
        return self.objects.abort_untouched(datetime.now(UTC) - timedelta(seconds=older_s))

    def check(self) -> None:
        self.objects.check()
