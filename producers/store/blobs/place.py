"""Chooses where blobs are: `s3://...` is a bucket, anything else a folder."""

from __future__ import annotations

import os

from producers.store.blobs import bucket
from producers.store.blobs.base import Blobs
from producers.store.blobs.folder import FolderBlobs


def open_blobs(place: str | os.PathLike[str]) -> Blobs:
    """The blobs of a folder, or of a bucket's URL (`producers.store.blobs.bucket`). Nothing connects before the first
    call. Raises ValueError for a bad URL, AwsNotInstalled, and AwsError."""
    if bucket.is_s3(os.fspath(place)):
        from producers.store.blobs.s3 import S3Blobs

        return S3Blobs(bucket.read(os.fspath(place)))
    return FolderBlobs(place)


def checked_place(place: str) -> str:
    """The place. Raises ValueError for a bad URL of a bucket, or another kind of URL."""
    if bucket.is_s3(place):
        bucket.read(place)
    elif "://" in place:
        raise ValueError(f"{place!r} is neither a folder nor a URL that begins with s3://")
    return place
