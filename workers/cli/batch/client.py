"""Client of the gateway's files and batches. It holds a piece of a file in memory."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote, urlsplit

from workers.cli.client import Gateway

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
#: Bytes of a file sent or received at a time.
PIECE: Final = 1 << 18


class BatchGateway(Gateway):
    """A gateway, asked for files and batches."""

    def upload(self, path: Path, file: BinaryIO) -> dict[str, Any]:
        """Upload an open file as a batch's input. Returns what is known of it."""
        boundary = secrets.token_hex(16)
        name = path.name.translate({ord(sign): quote(sign) for sign in '"\r\n'})
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode(errors="replace")
        tail = f"\r\n--{boundary}--\r\n".encode()
        size = path.stat().st_size
        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + size + len(tail)),
        }
        with self.opened("POST", "/v1/files", _form(head, file, size, tail), headers) as response:
            made: dict[str, Any] = json.load(response)
            return made

    def create_batch(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self.json("POST", "/v1/batches", fields)

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.json("GET", _path(batch_id))

    def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        return self.json("POST", _path(batch_id, "/cancel"))

    def batches(self, limit: int) -> Iterator[dict[str, Any]]:
        """Up to `limit` batches, the newest first."""
        after = ""
        while limit > 0:
            page = self.json("GET", f"/v1/batches?limit={min(limit, 100)}{after}")
            yield from page["data"]
            limit -= len(page["data"])
            if not page["has_more"]:
                return
            after = f"&after={page['last_id']}"

    def content(self, file_id: str, start: int) -> Iterator[bytes]:
        """A file's bytes from `start` on, a piece at a time."""
        headers = {"range": f"bytes={start}-"} if start else {}
        with self.opened("GET", f"/v1/files/{file_id}/content", None, headers) as response:
            if response.status != 307:
                yield from _pieces(response)
                return
            parts = urlsplit(response.headers["location"])
        bucket = Gateway(f"{parts.scheme}://{parts.netloc}", with_key=False)  # the URL itself opens the file
        with bucket.opened("GET", f"{parts.path}?{parts.query}", None, headers) as response:
            yield from _pieces(response)


def _pieces(response: HTTPResponse) -> Iterator[bytes]:
    while piece := response.read(PIECE):
        yield piece


def _form(head: bytes, file: BinaryIO, size: int, tail: bytes) -> Iterator[bytes]:
    """A form with the file's first `size` bytes: those that its length counts."""
    yield head
    while size and (piece := file.read(min(PIECE, size))):
        size -= len(piece)
        yield piece
    yield tail


def _path(batch_id: str, rest: str = "") -> str:
    return f"/v1/batches/{quote(batch_id, safe='', errors='surrogateescape')}{rest}"
