"""Reads a part of a batch's input: successive requests, as many as fit into a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from producers.store.batches import Batch
from producers.store.blobs import Ahead, Blobs, lines
from producers.sweeper.batches.validate import BadLine, Request, is_blank, request_of


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests from number `first` on (from 0; blank lines do not count). `ends`: for each, the offset behind it."""

    first: int
    requests: Sequence[Request]
    ends: Sequence[int]


def read_requests(
    blobs: Blobs, batch: Batch, first: int, offset: int, most: int, size: int, ahead: Ahead | None = None
) -> Requests:
    """Up to `most` requests that have up to `size` bytes, or one. `offset`: where the request `first` begins.
    `ahead`: as of `lines`.

    Blocks. Raises BlobNotFound and OSError; BadLine if the input is not what was checked.
    """
    requests: list[Request] = []
    ends: list[int] = []
    for line in lines(blobs, batch.input_file, offset, ahead=ahead):
        if is_blank(line):
            continue
        if requests and line.end - offset > size:
            break
        requests.append(request_of(line, batch.endpoint))
        ends.append(line.end)
        if len(requests) == most:
            break
    if not requests:
        raise BadLine(f"it has {first} requests, and had more when it was checked")
    return Requests(first, requests, ends)
