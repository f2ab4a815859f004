"""The interface of a store of blobs: named byte strings of any size, written once and whole."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from producers.errors import PenstockError

#: Bytes to read, or to write, in one call: what a caller holds in memory.
PIECE: Final = 1 << 20
#: Least size (bytes) of a part that S3 copies by itself, unless it is the last.
LEAST_PART: Final = 5 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


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

    place: str
    """The place, as `producers.store.blobs.open_blobs` takes it."""

    @abstractmethod
    def writer(self, name: str) -> BlobWriter:
        """A new blob of this name. Nothing of it is visible before `commit`, whatever dies.

        A commit under another name costs a copy on S3. If it dies meanwhile, the blob may be there under this name.
        """

    @abstractmethod
    def join(self, name: str, parts: Sequence[str]) -> int:
        """Make a blob of other blobs, in order, which stay. Returns its size (bytes). May be called again.

        Raises BlobNotFound if one is missing. S3 copies parts of LEAST_PART bytes and more by itself.
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
