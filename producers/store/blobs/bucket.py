"""A bucket's URL: `s3://BUCKET/PREFIX`, and the options of its query.

| option | meaning |
| --- | --- |
| `region` | the bucket's; unset: as boto3 finds it |
| `endpoint_url` | another server than AWS's own |
| `sse` | encryption of what is written: `AES256`, `aws:kms` or `aws:kms:dsse`; unset: as the bucket says |
| `kms_key_id` | the key for `aws:kms`: its id, ARN or alias; unset: the account's own for S3 |
| `class` | storage class of what is written; unset: `STANDARD` |

All that is under the prefix is Penstock's. The URL never has credentials.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from producers.connection.aws import check_no_password

SCHEME: Final = "s3"
#: A process's permissions on the bucket, and on the objects under the prefix; then what `aws:kms` adds.
PERMISSIONS: Final = ("s3:ListBucket", "s3:ListBucketMultipartUploads")
OBJECT_PERMISSIONS: Final = (
    *("s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
    *("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
)
KMS_PERMISSIONS: Final = ("kms:GenerateDataKey", "kms:Decrypt")
#: Storage classes that can be read at once.
CLASSES: Final = (
    *("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR"),
    *("REDUCED_REDUNDANCY", "EXPRESS_ONEZONE"),
)
ENCRYPTIONS: Final = ("AES256", "aws:kms", "aws:kms:dsse")
#: Days after which S3 ends an upload by itself; a slow one takes at most 34 hours.
UPLOAD_DAYS: Final = 2
_OPTIONS: Final = ("region", "endpoint_url", "sse", "kms_key_id", "class")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()-]+(?:/[A-Za-z0-9!_.*'()-]+)*")
_REGION: Final = re.compile(r"[a-z0-9-]+")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket's URL, as read. Unset options are empty."""

    name: str
    prefix: str = ""
    region: str = ""
    endpoint_url: str = ""
    sse: str = ""
    kms_key_id: str = ""
    storage_class: str = ""

    @property
    def url(self) -> str:
        """The URL that reads as this."""
        values = (self.region, self.endpoint_url, self.sse, self.kms_key_id, self.storage_class)
        options = {name: value for name, value in zip(_OPTIONS, values, strict=True) if value}
        return f"{self}{'?' if options else ''}{urlencode(options)}"

    @property
    def settings(self) -> dict[str, str]:
        """Arguments of each request that writes an object."""
        options = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.kms_key_id, "StorageClass": self.storage_class}
        return {name: value for name, value in options.items() if value}

    def key(self, name: str = "") -> str:
        """The key of a blob; without a name, what all keys begin with."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        return f"{SCHEME}://{self.name}" + (f"/{self.prefix}" if self.prefix else "")


def is_s3(location: str) -> bool:
    return location.startswith(f"{SCHEME}:")


def read(url: str) -> Bucket:
    """Raises ValueError, which says what is wrong with the URL."""
    parts = urlsplit(url)
    check_no_password(url)
    name, prefix = parts.netloc, parts.path.strip("/")
    if not url.startswith(f"{SCHEME}://") or not _BUCKET.fullmatch(name) or parts.fragment:
        raise ValueError(f"{url!r} names no bucket: it must be like s3://my-bucket/penstock?region=eu-west-1")
    if prefix and (not _PREFIX.fullmatch(prefix) or len(prefix) > 512):
        raise ValueError(
            f"{url!r} has the prefix {prefix!r}; it must be words of A-Z a-z 0-9 ! - _ . * ' ( ) with / between"
        )
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(f"{SCHEME}://{name} has the option {unknown[0]}; known are {', '.join(_OPTIONS)}")
    bucket = Bucket(name, prefix, *(options.get(option, "") for option in _OPTIONS))
    _check(bucket)
    return bucket


def _check(bucket: Bucket) -> None:
    if bucket.region and not _REGION.fullmatch(bucket.region):
        raise ValueError(f"region is {bucket.region!r}; it must be like eu-west-1")
    if bucket.endpoint_url and urlsplit(bucket.endpoint_url).scheme not in ("http", "https"):
        raise ValueError(f"endpoint_url is {bucket.endpoint_url!r}; it must begin with http:// or https://")
    if bucket.sse and bucket.sse not in ENCRYPTIONS:
        raise ValueError(f"sse is {bucket.sse!r}; it must be {', '.join(ENCRYPTIONS)}")
    if bucket.kms_key_id and not bucket.sse.startswith("aws:kms"):
        raise ValueError("kms_key_id needs sse=aws:kms")
    if bucket.storage_class and bucket.storage_class not in CLASSES:
        raise ValueError(
            f"class is {bucket.storage_class!r}; it must be one that can be read at once: {', '.join(CLASSES)}"
        )


def lifecycle(bucket: Bucket) -> list[dict[str, Any]]:
    """Rules that the bucket should have (`Rules` of PutBucketLifecycleConfiguration), for what a killed process leaves.

    S3 bills the parts of an upload that nobody ends, and the earlier versions in a bucket with versioning. Files
    themselves have no rule: Penstock removes them when their end has come.
    """
    return [
        {
            "ID": f"penstock-{bucket.prefix.replace('/', '-') or 'all'}"[:255],
            "Status": "Enabled",
            "Filter": {"Prefix": bucket.key()},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": UPLOAD_DAYS},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        }
    ]
