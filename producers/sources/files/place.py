"""The interface of a place: a bucket or a folder with an inbox and an outbox."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from producers.store.blobs import Blobs
from producers.store.inbox import InboxObject

#: Bytes that are read at a time: what a copy holds in memory, twice.
PIECE: Final = 4 << 20
SUFFIX: Final = ".jsonl"
ERRORS: Final = ".errors.jsonl"


class Replaced(Exception):
    """The object is gone, or has another content by now."""


class Stopped(Exception):
    """The process ends: the copy is given up."""


class Place(ABC):
    """A bucket or a folder. All methods block, and may raise OSError.

    `name`: the same in all processes that serve it. `moves`: whether an object leaves the inbox when its batch has
    ended. `changes`: whether `read` may give bytes of another content.
    """

    changes = False
    name: str
    moves: bool

    @abstractmethod
    def open(self) -> None:
        """Make, or check, what is needed."""

    @abstractmethod
    def url(self, name: str) -> str:
        """The place of an object of the inbox, for people."""

    @abstractmethod
    def find(self, name: str) -> InboxObject | None:
        """The object of this name, as it is now. None: there is none."""

    @abstractmethod
    def refusal(self, name: str) -> str | None:
        """Why an object of this name cannot be taken: its results could not be written. None: it can."""

    @abstractmethod
    def read(self, found: InboxObject, start: int, size: int) -> bytes:
        """Some bytes of an object, up to as many as asked for; none behind its end. Raises Replaced."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object of the outbox: whole or not at all, in place of one of that name. Blocks while it comes."""

    def write_blob(self, name: str, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> None:
        """Write a blob as an object of the outbox. Raises BlobNotFound, Stopped."""
        self.write(name, pieces(blobs, blob, stopped))

    @abstractmethod
    def leave(self, found: InboxObject) -> None:
        """Move the object out of the inbox, if it is there with this content."""

    def copy(self, found: InboxObject, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> int:
        """Make a blob of an object. Returns its size (bytes). Raises Replaced, Stopped."""
        with blobs.writer(blob) as writer:
            while writer.size < found.size:
                if stopped():
                    raise Stopped
                data = self.read(found, writer.size, min(PIECE, found.size - writer.size))
                if not data:
                    raise Replaced
                writer.write(data)
            if self.changes and self.find(found.name) != found:
                raise Replaced
            writer.commit()
        return found.size


def is_input(name: str) -> bool:
    """Whether an object of this name is taken. An errors file's name would be that of another input's errors."""
    return name.endswith(SUFFIX) and not name.endswith(ERRORS) and name.rpartition("/")[2] != SUFFIX


def pieces(blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """A blob's bytes. Raises BlobNotFound, Stopped."""
    at = 0
    while piece := blobs.read(blob, at, PIECE):
        if stopped():
            raise Stopped
        at += len(piece)
        yield piece
