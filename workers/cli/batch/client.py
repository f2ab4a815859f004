"""Client of the gateway's files and batches. It holds a piece of a file in memory."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from http.client import HTTPResponse
from itertools import chain, islice
from typing import Any, BinaryIO, Final
from urllib.parse import quote, urlsplit

from workers.cli.client import Gateway, path_of

ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
#: Bytes of a file sent or received at a time.
PIECE: Final = 1 << 18


class BatchGateway(Gateway):
    """A gateway, asked for files and batches."""

    def upload(self, name: str, size: int, pieces: Iterable[bytes]) -> dict[str, Any]:
        """Upload the `size` bytes of a batch's input. Returns what is known of the file."""
        boundary = secrets.token_hex(16)
        name = name.translate({ord(sign): quote(sign) for sign in '"\r\n'})
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        ).encode(errors="replace")
        tail = f"\r\n--{boundary}--\r\n".encode()
        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + size + len(tail)),
        }
        with self.opened("POST", "/v1/files", chain([head], pieces, [tail]), headers) as response:
            made: dict[str, Any] = json.load(response)
            return made

    def create_batch(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self.json("POST", "/v1/batches", fields)

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.json("GET", path_of("batches", batch_id))

    def cancel_batch(self, batch_id: str) -> dict[str, Any]:
        return self.json("POST", path_of("batches", batch_id, "/cancel"))

    def batches(self, limit: int) -> Iterator[dict[str, Any]]:
        """Up to `limit` batches, the newest first."""
        return islice(self.listed("/v1/batches", {"limit": min(limit, 100)}), limit)

    def content(self, file_id: str, start: int) -> Iterator[bytes]:
        """A file's bytes from `start` on, a piece at a time."""
        headers = {"range": f"bytes={start}-"} if start else {}
        with self.opened("GET", path_of("files", file_id, "/content"), None, headers) as response:
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


def pieces_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    """A file's next `size` bytes, or what it has of them."""
    while size and (piece := file.read(min(PIECE, size))):
        size -= len(piece)
        yield piece
