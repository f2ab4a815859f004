"""Blobs in a folder, which all gateways and sweepers share: a local disk, or a network's file system.

    <folder>/<name>                a blob
    <folder>/.incoming/<random>    a writer's file, renamed to its name by commit

A rename is atomic, and comes after the file's bytes are on disk. So a blob is there whole or not at all, whatever is
killed, and after a power cut as well. `clean` removes what a killed writer left.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from producers.store.blobs.base import PIECE, BlobNotFound, Blobs, BlobWriter, checked


class FolderBlobs(Blobs):
    """The folder is made by the first writer: a gateway that nobody sends files to needs none.

    `mode`: the rights of its files, less the umask. Callers' data is for this user alone: all processes that share the
    folder run as one.
    """

    def __init__(self, folder: str | os.PathLike[str], mode: int = 0o600) -> None:
        self._folder = Path(folder).absolute()
        self._mode = mode
        self.location = str(self._folder)
        self._incoming = self._folder / ".incoming"

    def writer(self, name: str) -> FolderWriter:
        if not self._incoming.exists():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._incoming.mkdir(mode=0o700, exist_ok=True)
        return FolderWriter(self._incoming / secrets.token_hex(16), self._folder, checked(name), self._mode)

    def join(self, name: str, parts: Sequence[str]) -> int:
        with self.writer(name) as writer:
            for part in parts:
                self._copy(part, writer)
            writer.commit()
        return writer.size

    def size(self, name: str) -> int:
        with _blob_errors(name):
            return self._path(name).stat().st_size

    def read(self, name: str, start: int, size: int) -> bytes:
        with _blob_errors(name), open(self._path(name), "rb", buffering=0) as file:
            file.seek(start)
            return _read(file.fileno(), size)

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def url(self, name: str, filename: str, seconds: int) -> str | None:
        return None

    def check(self) -> None:
        """Nothing: the first writer makes the folder."""

    def names(self, prefix: str) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            return [entry.name for entry in entries if entry.name.startswith(prefix) and not entry.name.startswith(".")]
        return []

    def clean(self, older_s: float) -> int:
        before = time.time() - older_s
        return sum(_removed(path) for path in _untouched(self._incoming, before))

    def _path(self, name: str) -> Path:
        return self._folder / checked(name)

    def _copy(self, name: str, writer: BlobWriter) -> None:
        with _blob_errors(name), open(self._path(name), "rb", buffering=0) as part:
            while data := part.read(PIECE):
                writer.write(data)


class FolderWriter(BlobWriter):
    """Writes a file at `path`, to be renamed into `folder`."""

    def __init__(self, path: Path, folder: Path, name: str, mode: int) -> None:
        self.size = 0
        self._name = name
        self._path = path
        self._folder = folder
        self._file = open(path, "xb", buffering=0, opener=partial(os.open, mode=mode))  # noqa: SIM115 - see __exit__

    def write(self, data: bytes | memoryview) -> None:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._file.write(remaining) :]
        self.size += len(data)

    def commit(self, name: str = "") -> None:
        self.rename(self._folder / checked(name or self._name))

    def rename(self, target: Path) -> None:
        """Make the file visible at any path of this file system: whole, and durable. Raises OSError."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.rename(self._path, target)
        _sync(target.parent)

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


@contextmanager
def _blob_errors(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BlobNotFound(f"there is no blob {name}") from None


def _read(fd: int, size: int) -> bytes:
    """Up to `size` bytes; fewer only at the end of the file."""
    data = os.read(fd, size)
    if not data or len(data) == size:
        return data
    pieces, remaining = [data], size - len(data)
    while remaining and (data := os.read(fd, remaining)):
        pieces.append(data)
        remaining -= len(data)
    return b"".join(pieces)


def _untouched(folder: Path, before: float) -> list[Path]:
    """Files that nobody has written to since."""
    paths = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # committed or discarded meanwhile
                if entry.stat().st_mtime < before:
                    paths.append(Path(entry.path))
    return paths


def _removed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Make a rename in the folder last through a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
