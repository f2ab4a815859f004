"""Bytes of files: uploads, and what batches write. `producers.store.files` has what is known of a file.

base has the interface, and the lines of JSONL; folder keeps blobs in a folder that all gateways and sweepers share
s3 keeps them in a bucket, whose URL bucket reads; open_blobs chooses: `s3://...` is a bucket, anything else a folder

    upload:  writer(name) -> write ... -> commit()         whole and durable from then on, or never there
    batch:   parts by writers of their own -> join(name, parts) -> delete each part
    read:    size(name), read(name, start, size); lines(blobs, name) for JSONL

All calls block: call them on a thread (`asyncio.to_thread`).
"""

from __future__ import annotations

import os

from producers.store.blobs import bucket
from producers.store.blobs.base import Ahead, BlobNotFound, Blobs, BlobWriter, Line, lines
from producers.store.blobs.folder import FolderBlobs

__all__ = [
    "Ahead",
    "BlobNotFound",
    "BlobWriter",
    "Blobs",
    "FolderBlobs",
    "Line",
    "lines",
    "open_blobs",
    "valid_location",
]


def open_blobs(location: str | os.PathLike[str]) -> Blobs:
    """The blobs of a folder, or of a bucket's URL (`producers.store.blobs.bucket`). Nothing connects before the first
    call. Raises ValueError for a bad URL, AwsNotInstalled, and AwsError."""
    if bucket.is_s3(os.fspath(location)):
        from producers.store.blobs.s3 import S3Blobs

        return S3Blobs(bucket.read(os.fspath(location)))
    return FolderBlobs(location)


def valid_location(location: str) -> str:
    """The place. Raises ValueError for a bad URL of a bucket, or another kind of URL."""
    if bucket.is_s3(location):
        bucket.read(location)
    elif "://" in location:
        raise ValueError(f"{location!r} is neither a folder nor a URL that begins with s3://")
    return location
