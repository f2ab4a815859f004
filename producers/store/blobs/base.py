"""A store of blobs: named byte strings of any size, written once and whole; and the lines of a blob."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from producers.errors import PenstockError

#: Bytes to read, or to write, in one call: what a caller holds in memory.
PIECE: Final = 1 << 20
#: Least size (bytes) of a part that S3 copies by itself, unless it is the last.
MIN_PART: Final = 5 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
#: Longest line (bytes) whose content is kept.
MAX_LINE: Final = 4 << 20
#: Most blobs of which an Ahead has a piece.
MAX_AHEAD: Final = 16


class BlobNotFound(PenstockError, KeyError):
    """There is no blob, or part, of that name."""

    def __str__(self) -> str:
        return str(self.args[0])


class BlobWriter(AbstractContextManager["BlobWriter"], ABC):
    """A blob that is being written. Leaving the context without `commit` discards it."""

    size: int
    """Bytes written so far."""

    @abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises OSError, also for a full disk."""

    @abstractmethod
    def commit(self, name: str = "") -> None:
        """Make the blob visible under its name, or under another one: whole, and durable.

        A blob of that name is replaced. Raises OSError.
        """


class Blobs(ABC):
    """A place of blobs. Names are 1 to 128 of `A-Za-z0-9_.-`, and begin with none of `.-`.

    Any method may raise OSError: the disk is full, or the folder or bucket cannot be reached.
    """

    location: str
    """The place, as `producers.store.blobs.open_blobs` takes it."""

    @abstractmethod
    def writer(self, name: str) -> BlobWriter:
        """A new blob of this name. Nothing of it is visible before `commit`, whatever dies.

        A commit under another name costs a copy on S3. If it dies meanwhile, the blob may be there under this name.
        """

    @abstractmethod
    def join(self, name: str, parts: Sequence[str]) -> int:
        """Make a blob of other blobs, in order, which stay. Returns its size (bytes). May be called again.

        Raises BlobNotFound if one is missing. S3 copies parts of MIN_PART bytes and more by itself.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Size in bytes. Raises BlobNotFound."""

    @abstractmethod
    def read(self, name: str, start: int, size: int) -> bytes:
        """Up to `size` bytes from `start` on; fewer only at the end of the blob. Raises BlobNotFound."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the blob, if there is one."""

    @abstractmethod
    def url(self, name: str, filename: str, seconds: int) -> str | None:
        """A URL from which anybody can download the blob for `seconds`, as `filename`. None where there are no URLs.

        Nothing is asked for it: the blob may be missing.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise OSError if what was set up outside is missing, or may not be used."""

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """The names of all blobs that begin so."""

    @abstractmethod
    def clean(self, older_s: float) -> int:
        """Remove what dead writers left: uncommitted blobs that nobody has written to for `older_s`. Returns how
        many."""


def checked(name: str) -> str:
    """The name. Raises ValueError for one that could lead out of the folder, or of the bucket's prefix."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a blob")
    return name


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
    """Keeps bytes that were read beyond the requested lines, for the next call, which goes on there.

    Threads may share it, each with blobs of its own.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, tuple[int, bytes]] = {}

    def put(self, name: str, start: int, piece: bytes) -> None:
        if name not in self._pieces and len(self._pieces) >= MAX_AHEAD:
            self._pieces.clear()
        self._pieces[name] = start, piece

    def get(self, name: str, offset: int) -> bytes:
        """The kept bytes from `offset` on; empty if there are none."""
        start, piece = self._pieces.get(name, (0, b""))
        return piece[offset - start :] if start <= offset < start + len(piece) else b""


def lines(
    blobs: Blobs, name: str, offset: int = 0, number: int = 1, longest: int = MAX_LINE, ahead: Ahead | None = None
) -> Iterator[Line]:
    """The lines from `offset` on, which is where line `number` begins. Empty lines are among them.

    `ahead`: what is read beyond them goes there, and is used if a call before has read it. Lines end with LF or CRLF;
    the last may lack its end. Blocks; holds a piece and a line in memory. Raises BlobNotFound and OSError.
    """
    pending, begin, read, skipping = bytearray(), offset, offset, False
    while piece := (ahead.get(name, read) if ahead else b"") or blobs.read(name, read, PIECE):
        if ahead is not None:
            ahead.put(name, read, piece)
        read += len(piece)
        at = 0
        while (end := piece.find(b"\n", at)) >= 0:
            pending += piece[at:end]
            at, after = end + 1, read - len(piece) + end + 1
            yield Line(number, begin, after, None if skipping or len(pending) > longest else _line(pending))
            begin, skipping = after, False
            number += 1
            pending.clear()
        pending += piece[at:]
        if len(pending) > longest + 1:
            skipping = True
        if skipping:
            pending.clear()
    if begin < read:
        yield Line(number, begin, read, None if skipping or len(pending) > longest else _line(pending))


def _line(data: bytearray) -> bytes:
    return bytes(data.removesuffix(b"\r"))
