"""Bytes of files: uploads, and what batches write. What is known of a file is in `producers.store.files`.

base has the interface, and place chooses: folder keeps blobs in a folder that all gateways and sweepers share
s3 keeps them in a bucket, whose URL bucket reads: objects asks for them, downloads reads on, multipart writes
lines reads JSONL

    upload:  writer(name) -> write ... -> commit()         whole and durable from then on, or never there
    batch:   parts by writers of their own -> join(name, parts) -> delete each part
    read:    size(name), read(name, start, size); lines(blobs, name) for JSONL

All calls block: call them on a thread (`asyncio.to_thread`).
"""

from producers.store.blobs.base import BlobNotFound, Blobs, BlobWriter
from producers.store.blobs.folder import FolderBlobs
from producers.store.blobs.lines import Ahead, Line, lines
from producers.store.blobs.place import open_blobs

__all__ = ["Ahead", "BlobNotFound", "BlobWriter", "Blobs", "FolderBlobs", "Line", "lines", "open_blobs"]
