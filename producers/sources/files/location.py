"""The interface of a location: a bucket or a folder with an inbox and an outbox."""

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
    """The process ends, and gives the copy up."""


class Location(ABC):
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
        """Returns the URL or path of an object of the inbox, for people."""

    @abstractmethod
    def find(self, name: str) -> InboxObject | None:
        """Returns the object of this name, as it is now; None if there is none."""

    @abstractmethod
    def refusal(self, name: str) -> str | None:
        """Returns why an object of this name cannot be taken: its results could not be written. None if it can."""

    @abstractmethod
    def read(self, item: InboxObject, start: int, size: int) -> bytes:
        """Returns up to `size` bytes of an object; none behind its end. Raises Replaced."""

    @abstractmethod
    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write an object of the outbox, whole or not at all, over one of that name. Blocks while pieces come."""

    def write_blob(self, name: str, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> None:
        """Write a blob as an object of the outbox. Raises BlobNotFound, Stopped."""
        self.write(name, pieces(blobs, blob, stopped))

    @abstractmethod
    def leave(self, item: InboxObject) -> None:
        """Move the object out of the inbox, if it is there with this content."""

    def copy(self, item: InboxObject, blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> int:
        """Make a blob of an object. Returns its size (bytes). Raises Replaced, Stopped."""
        with blobs.writer(blob) as writer:
            while writer.size < item.size:
                if stopped():
                    raise Stopped
                data = self.read(item, writer.size, min(PIECE, item.size - writer.size))
                if not data:
                    raise Replaced
                writer.write(data)
            if self.changes and self.find(item.name) != item:
                raise Replaced
            writer.commit()
        return item.size


def is_input(name: str) -> bool:
    """Whether an object of this name is taken. The name of an errors file would be that of another input's errors."""
    return name.endswith(SUFFIX) and not name.endswith(ERRORS) and name.rpartition("/")[2] != SUFFIX


def pieces(blobs: Blobs, blob: str, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """A blob's bytes. Raises BlobNotFound, Stopped."""
    at = 0
    while piece := blobs.read(blob, at, PIECE):
        if stopped():
            raise Stopped
        at += len(piece)
        yield piece
