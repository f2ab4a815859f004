"""Reads the lines of a blob, in bounded memory, from any line on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from producers.store.blobs.base import PIECE, Blobs

#: Longest line (bytes) whose content is kept.
LONGEST: Final = 4 << 20
#: Most blobs of which an Ahead has a piece.
MOST_AHEAD: Final = 16


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a blob. `data` has no line end; it is None for a line that is longer than asked for."""

    number: int
    """From 1."""
    offset: int
    """Its first byte."""
    end: int
    """The first byte of the next one: pass it on to go on from there."""
    data: bytes | None


class Ahead:
    """Keeps what was read of blobs beyond the lines that were asked for, for who goes on there.

    Threads may share it, each with blobs of its own.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[int, bytes]] = {}

    def put(self, name: str, start: int, piece: bytes) -> None:
        if name not in self._pieces and len(self._pieces) >= MOST_AHEAD:
            self._pieces.clear()
        self._pieces[name] = start, piece

    def get(self, name: str, offset: int) -> bytes:
        """The bytes from `offset` on that are here; none if there are none."""
        start, piece = self._pieces.get(name, (0, b""))
        return piece[offset - start :] if start <= offset < start + len(piece) else b""


def lines(
    blobs: Blobs, name: str, offset: int = 0, number: int = 1, longest: int = LONGEST, ahead: Ahead | None = None
) -> Iterator[Line]:
    """The lines from `offset` on, which is where line `number` begins. Empty lines are among them.

    `ahead`: what is read beyond them goes there, and is used if a call before has read it. Lines end with LF or CRLF;
    the last may lack its end. Blocks; holds a piece and a line in memory. Raises BlobNotFound and OSError.
    """
    rest, begin, read, skipping = bytearray(), offset, offset, False
    while piece := (ahead.get(name, read) if ahead else b"") or blobs.read(name, read, PIECE):
        if ahead is not None:
            ahead.put(name, read, piece)
        read += len(piece)
        at = 0
        while (end := piece.find(b"\n", at)) >= 0:
            rest += piece[at:end]
            at, after = end + 1, read - len(piece) + end + 1
            yield Line(number, begin, after, None if skipping or len(rest) > longest else _line(rest))
            begin, skipping = after, False
            number += 1
            rest.clear()
        rest += piece[at:]
        if len(rest) > longest + 1:
            skipping = True
        if skipping:
            rest.clear()
    if begin < read:
        yield Line(number, begin, read, None if skipping or len(rest) > longest else _line(rest))


def _line(data: bytearray) -> bytes:
    return bytes(data.removesuffix(b"\r"))
