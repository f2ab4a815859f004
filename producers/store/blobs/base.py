"""The interface of a store of blobs: named byte strings of any size, written once and whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from producers.errors import PenstockError

#: Bytes to read, or to write, in one call: what a caller holds in memory.
PIECE: Final = 1 << 20
#: Least size (bytes) of a part, but for the last: S3 joins no smaller ones.
LEAST_PART: Final = 5 << 20


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
    def commit(self, name: str) -> None:
        """Make the blob visible under its name: whole, and durable. A blob of that name is replaced. Raises OSError."""


class Blobs(ABC):
    """Where blobs are. Names are 1 to 128 of `A-Za-z0-9_.-`, and begin with none of `.-`.

    Any method may raise OSError: the disk is full, or the folder cannot be reached.
    """

    @abstractmethod
    def writer(self) -> BlobWriter:
        """A new blob. Nothing of it is visible before `commit`, whatever dies."""

    @abstractmethod
    def join(self, name: str, parts: Sequence[str]) -> int:
        """Make a blob of other blobs, in order, which stay. Returns its size (bytes). May be called again.

        All parts but the last have at least LEAST_PART bytes. Raises BlobNotFound if one is missing.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Size in bytes. Raises BlobNotFound."""

    @abstractmethod
    def read(self, name: str, start: int, size: int) -> bytes:
        """Up to `size` bytes from `start` on; fewer only at the end of the blob. Raises BlobNotFound."""

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Remove the blob. False if there was none."""

    @abstractmethod
    def clean(self, older_s: float) -> int:
        """Remove what dead writers left: uncommitted blobs that nobody has written to for `older_s`. Returns how
        many."""
